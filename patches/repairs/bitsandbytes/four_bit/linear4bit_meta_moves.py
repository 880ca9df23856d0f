"""4-bit layers cannot go to the meta device, and come back from it as something else.

``torch.nn.Module`` makes a new ``Parameter`` when it cannot swap ``.data``, which is so between meta and any
other device. For a ``Params4bit`` that raises in ``layer.to("meta")`` (``Creating a Parameter from an
instance of type Params4bit requires that detach() returns an instance of the same type``), and in
``to_empty`` it gives a plain ``Parameter``: a layer built on meta and emptied onto a device never quantizes
what is then loaded into it, without a word, and one that was quantized has lost its state. 0.46.1 to 0.50.2.

The repair wraps ``_apply`` of ``Linear4bit`` and ``Embedding4bit``: what torch makes anew becomes a ``Params4bit`` again, with the
attributes of the old one. A quantized weight keeps its statistics; its codes are uninitialized, as every
weight that comes from meta, until ``load_state_dict`` fills them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute

if TYPE_CHECKING:
    from torch import Tensor


def make(original: Callable[..., Any] | None) -> Callable[..., Any]:
    """``_apply`` of a 4-bit layer, over that of ``nn.Module`` (or one that someone has put there)."""
    import torch

    inherited = original or torch.nn.Module._apply

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        from bitsandbytes.nn import Params4bit

        old = self._parameters.get("weight")
        if not isinstance(old, Params4bit):
            return inherited(self, fn, recurse)

        def plain_across_meta(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved.data if tensor is old and tensor.is_meta != moved.is_meta else moved

        result = inherited(self, plain_across_meta, recurse)
        new = self._parameters["weight"]
        if type(new) is torch.nn.Parameter:
            self._parameters["weight"] = _like(old, new)
        return result

    return _apply


def _like(old: Any, new: Tensor) -> Any:
    """``new`` as a parameter of the class and with the attributes of ``old``."""
    made = type(old)(new.data, requires_grad=old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made


def defect() -> Finding:
    """A layer built on meta, emptied onto the CPU and filled: is it quantized when it is moved?"""
    import torch
    from bitsandbytes.nn import Linear4bit

    with torch.device("meta"):
        layer = Linear4bit(64, 64, quant_type="nf4")
    layer.to_empty(device="cpu").load_state_dict(torch.nn.Linear(64, 64).state_dict())
    layer.to("cpu")
    kind = type(layer.weight).__name__
    return Finding(kind != "Params4bit", f"the weight of a layer from meta is a {kind} in {layer.weight.dtype}")


PATCH = Patch(
    id="bitsandbytes-linear4bit-meta-moves",
    summary="4-bit layers cannot go to meta, and come back from it as layers that never quantize",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1525",),
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        SetAttribute("bitsandbytes.nn.modules:Linear4bit._apply", make=make),
        SetAttribute("bitsandbytes.nn.modules:Embedding4bit._apply", make=make),
    ),
    defect=defect,
)
