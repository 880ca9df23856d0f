"""What ``to()``, ``half()``, ``to_empty()`` and the like of a module do to a quantized layer: around its ``_apply``.

``torch.nn.Module`` makes a plain ``Parameter`` of a tensor that it cannot put in place by ``.data``, as between
meta and any other device, and refuses to do so for a subclass that its ``detach()`` does not keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import SetAttribute
from ..layer_methods import wrap_method
from .parameter_copies import make_like

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Apply = Callable[..., Any]
Function = Callable[["Tensor"], "Tensor"]


def follow_moves(
    owner: str, cls: str = "", settle: Callable[[Any, dict[str, Any], int], None] | None = None
) -> SetAttribute:
    """Return the edit of ``_apply`` of the layer ``owner`` of ``bitsandbytes.nn``.

    Parameters of the class ``cls``, if given, keep their class and attributes across meta. Then
    ``settle(layer, old, address)`` moves the other tensors of the layer, given its former parameters and the former address
    of its weight.
    """

    def run(layer: Module, inherited: Apply, fn: Function, recurse: bool = True) -> Any:
        import bitsandbytes.nn.modules as nn

        old = dict(layer._parameters)
        address = _address(old.get("weight"))
        result = _across_meta(layer, inherited, fn, recurse, getattr(nn, cls)) if cls else inherited(fn, recurse)
        if settle is not None:
            settle(layer, old, address)
        return result

    return wrap_method(owner, "_apply", run)


def _address(weight: Tensor | None) -> int:
    try:
        return 0 if weight is None else weight.data_ptr()
    except RuntimeError:  # it has none: fake, or inside a transform
        return 0


def _across_meta(layer: Module, inherited: Apply, fn: Function, recurse: bool, cls: type) -> Any:
    """Return ``inherited(fn, recurse)``, in which parameters of the class ``cls`` keep their class."""
    kept = {name: p for name, p in layer._parameters.items() if isinstance(p, cls)}

    def plain_across_meta(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return moved.data if isinstance(tensor, cls) and tensor.is_meta != moved.is_meta else moved

    result = inherited(plain_across_meta, recurse)
    for name, old in kept.items():
        new: Any = layer._parameters[name]
        if type(new) is not type(old):
            layer._parameters[name] = made = make_like(old, new.data)
            made.grad = new.grad
    return result
