"""How the backward of a quantized product finds the weight that its forward used.

A *resident* weight is a parameter that stays with its module. A reference and its version number are enough; the check
that autograd makes of a saved tensor, that nobody wrote to it in between, is made here. ``ctx.save_for_backward`` would show
it to saved-tensor hooks: ``save_on_cpu`` would carry every frozen weight to the CPU and back, and non-reentrant checkpointing,
which recomputes until it has all that was saved, would recompute the last layers only for their weights.

An *onloaded* weight is put into its module by a hook of accelerate for one forward and taken out after it. A reference would
hold it on the device until backward. So it is saved with autograd, as is every tensor that is no parameter: hooks see
it, and checkpointing onloads it again instead of keeping it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import accelerate_hooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

onloaded: dict[int, weakref.ref[Tensor]] = {}
"""The living weights that a hook has onloaded, by ``id``. Empty where nothing is offloaded."""

parameter_classes: set[type] = set()
"""The subclasses of ``torch.nn.Parameter`` that :func:`is_resident` has seen.

What is called once a layer looks here first: if nothing is onloaded, a tensor of such a class is resident.
"""


def record_onloaded_weight(layer: Module) -> None:
    """Note in the forward of ``layer`` that its weight was onloaded by a hook, if it was."""
    if vars(layer).get("_hf_hook") is None:
        return
    import torch

    if torch.compiler.is_compiling() or accelerate_hooks.hook_of(layer, visited=True) is None:
        return
    weight: Any = layer.weight
    key = id(weight)
    onloaded[key] = weakref.ref(weight, lambda _: onloaded.pop(key, None))


def is_resident(parameter: Any) -> bool:
    """Tell whether ``parameter`` is a parameter, and not None or another tensor, that no hook has onloaded."""
    kind = type(parameter)
    if kind not in parameter_classes:
        import torch

        if not issubclass(kind, torch.nn.Parameter):
            return False
        parameter_classes.add(kind)  # saves the next forwards the import, which takes 0.5 us
    known = onloaded.get(id(parameter)) if onloaded else None
    return known is None or known() is not parameter


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return how often each of ``tensors`` was written to; None if one was made in inference mode, where torch counts nothing."""
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:
        return None


def raise_version_error(tensors: Sequence[Tensor], versions: Sequence[int]) -> NoReturn:
    """Raise autograd's error for the first of ``tensors`` whose version is no longer the one in ``versions``."""
    written, expected = next((t, version) for t, version in zip(tensors, versions) if t._version != version)
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{written.dtype} {list(written.shape)}], part of a quantized weight, is at version {written._version}; "
        f"expected version {expected} instead. It was written to after the forward that used it: "
        "write to it before the forward or after backward"
    )


def is_savable(*tensors: Tensor | None) -> bool:
    """Tell whether ``ctx.save_for_backward`` takes ``tensors``: it takes none that was made in inference mode."""
    import torch

    return torch.compiler.is_compiling() or not any(t is not None and t.is_inference() for t in tensors)


class SavedElsewhere:
    """An object on ``ctx`` where the original backward looks for tensors, which are saved with autograd instead."""

    def __init__(self, patch: str) -> None:
        self.__dict__["patch"] = patch

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"{vars(self)['patch']} was reverted between forward and backward: run forward again")

    __iter__ = __getattr__ = _refuse
