"""Pickle and ``torch.save`` turn a ``Params4bit`` into a plain ``Parameter``.

``torch.save(model)`` and ``pickle.dumps(weight)`` go through ``Parameter.__reduce_ex__``, which rebuilds a
``torch.nn.Parameter`` and hangs the attributes on it. What comes back infers, but is no 4-bit weight any more:
a weight that was not quantized yet never will be, and a quantized one has its packed bits cast as numbers by
the next ``.to(dtype)``, is not recognized by peft, and does not move its statistics with it. All releases.

The repair adds the class to those attributes, so that the rest of the pickle is what torch makes it. It names
nothing of ours and loads in a process without the patch. Where a pickle holds no ``QuantState`` and no layer (a
weight alone that is not quantized yet), ``torch.load`` reads it with ``weights_only=True``, its default, which
refuses the name of a class: that one stays as it was.

A layer whose pickle names no class (written without the patch) gives it to its weights when it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute
from ...helpers.four_bit import four_bit_state
from ...helpers.weights.parameters import is_read_by_default, make_setstate, with_class

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit


def _reduce_ex(self: Params4bit, protocol: int) -> tuple[Any, ...]:
    from bitsandbytes.nn import Params4bit

    reduced = super(Params4bit, self).__reduce_ex__(protocol)
    plain = four_bit_state.of(self) is None and self.module is None
    return reduced if plain and is_read_by_default(protocol) else with_class(reduced, self)


def defect() -> Finding:
    """Save a layer and load it."""
    import io

    import torch
    from bitsandbytes.nn import Linear4bit

    file = io.BytesIO()
    torch.save(Linear4bit(64, 64, quant_type="nf4").to("cpu"), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return Finding(
        type(loaded.weight).__name__ != "Params4bit",
        f"a saved and loaded Linear4bit has a weight of type {type(loaded.weight).__name__}",
    )


PATCH = Patch(
    id="bitsandbytes-params4bit-pickle",
    summary="pickle and torch.save turn the weight of a 4-bit layer into a plain Parameter",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L244",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.8", "2.13", "2.14", "2.15"),
    edits=(
        SetAttribute("bitsandbytes.nn.modules:Params4bit.__reduce_ex__", value=_reduce_ex),
        *(
            SetAttribute(
                f"bitsandbytes.nn.modules:{layer}.__setstate__",
                make=make_setstate(layer, "Params4bit", four_bit_state.MARKS),
            )
            for layer in ("Linear4bit", "Embedding4bit")
        ),
    ),
    defect=defect,
)
