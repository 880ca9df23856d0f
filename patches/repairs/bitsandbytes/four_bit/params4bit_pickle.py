"""Pickle and ``torch.save`` turn a ``Params4bit`` into a plain ``Parameter``.

``torch.save(model)`` and ``pickle.dumps(weight)`` use ``Parameter.__reduce_ex__``, which rebuilds a
``torch.nn.Parameter`` and sets the attributes on it. The result computes, but is no 4-bit weight any more. If it was
not quantized yet, it never will be. If it was, the next ``.to(dtype)`` casts its packed bits as values, peft does not
recognize it, and its quantization state does not move with it. All releases.

The repair adds the class to these attributes; the rest of the pickle is as torch makes it. The pickle names nothing of
bnb-patches and loads in a process without the plugin. If a pickle holds no ``QuantState`` and no layer (a weight alone
that is not quantized yet), ``torch.load`` reads it with ``weights_only=True``, its default, which refuses the name of
a class. Such a pickle stays as it was.

When a layer is loaded whose pickle names no class (written without the patch), it gives its weights their class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute
from ....quantized.four_bit import quant_states
from ....quantized.weights.parameter_copies import is_read_by_default, make_setstate, reduce_with_class

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit


def _make_reduce_ex(original: None) -> Callable[[Params4bit, int], tuple[Any, ...]]:
    from bitsandbytes.nn.modules import Params4bit

    def __reduce_ex__(self: Params4bit, protocol: int) -> tuple[Any, ...]:
        reduced = super(Params4bit, self).__reduce_ex__(protocol)
        plain = quant_states.get_quant_state(self) is None and self.module is None
        return reduced if plain and is_read_by_default(protocol) else reduce_with_class(reduced, self)

    return __reduce_ex__


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
        SetAttribute("bitsandbytes.nn.modules:Params4bit.__reduce_ex__", make=_make_reduce_ex),
        *(
            SetAttribute(
                f"bitsandbytes.nn.modules:{layer}.__setstate__",
                make=make_setstate(layer, "Params4bit", quant_states.MARKS),
            )
            for layer in ("Linear4bit", "Embedding4bit")
        ),
    ),
    defect=defect,
)
