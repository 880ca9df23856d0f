"""Pickle and ``torch.save`` turn a ``Params4bit`` into a plain ``Parameter``.

``torch.save(model)`` and ``pickle.dumps(weight)`` go through ``Parameter.__reduce_ex__``, which rebuilds a
``torch.nn.Parameter`` and hangs the attributes on it. What comes back infers, but is no 4-bit weight any more:
a weight that was not quantized yet never will be, and a quantized one has its packed bits cast as numbers by
the next ``.to(dtype)``, is not recognized by peft, and does not move its statistics with it. All releases.

The repair gives the class a ``__reduce_ex__`` that rebuilds the class, from the state that its own
``__getstate__`` collects. The pickle names nothing of ours: it loads in a process without the patch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit


def reduce_ex(self: Params4bit, protocol: int) -> tuple[Any, ...]:
    """Rebuild the class from its data, then give it its state."""
    state = self.__getstate__()
    return type(self), (state["data"], self.requires_grad), state


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
    summary="pickle and torch.save of a 4-bit layer give back a plain Parameter",
    links=(),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(SetAttribute("bitsandbytes.nn.modules:Params4bit.__reduce_ex__", reduce_ex),),
    defect=defect,
)
