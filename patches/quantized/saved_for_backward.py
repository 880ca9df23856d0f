"""How the backward of a quantized product finds the weight that its forward used.

A *resident* weight, a parameter that stays with its module, needs no saving: a reference and its
version number do. ``ctx.save_for_backward`` would show it to saved-tensor hooks, and these cost:
``save_on_cpu`` carries every frozen weight to the CPU and back, and non-reentrant checkpointing stops
recomputing once it has all that was saved, so that weights saved by the last layers make it compute them
again. What autograd does beside saving, to refuse a tensor that was written to in between, is done here.

A *brought* weight is put into its module by a hook of accelerate for one forward and taken out after it.
A reference would hold it on the device until backward. It is to be saved, and so is whatever is no
parameter: hooks see it, and checkpointing brings it again instead of keeping it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import accelerate_hooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_brought: dict[int, weakref.ref[Tensor]] = {}
"""Weights alive that a hook brought, by ``id``. Empty, and so free to ask, where nothing is offloaded."""


def record_onloaded_weight(layer: Module) -> None:
    """Called in the forward of ``layer``: if its weight was brought by a hook, remember that it was."""
    if vars(layer).get("_hf_hook") is None:
        return
    import torch

    if torch.compiler.is_compiling() or accelerate_hooks.hook_of(layer, visited=True) is None:
        return
    weight: Any = layer.weight
    key = id(weight)
    _brought[key] = weakref.ref(weight, lambda _: _brought.pop(key, None))


def is_resident(parameter: Any) -> bool:
    """Whether ``parameter`` is one that stays with its module. False for an object that is no parameter, such as None."""
    if type(parameter) not in _parameters and not _is_parameter(type(parameter)):
        return False
    return not (_brought and (known := _brought.get(id(parameter))) is not None and known() is parameter)


_parameters: set[type] = set()
"""The classes of parameters that were asked for."""


def _is_parameter(cls: type) -> bool:
    import torch

    if issubclass(cls, torch.nn.Parameter):
        _parameters.add(cls)
        return True
    return False


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """How often each was written to. None if torch does not count, for what was made in inference mode."""
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:
        return None


def raise_version_error(tensors: Sequence[Tensor], versions: Sequence[int]) -> NoReturn:
    """Raise autograd's error: one of ``tensors`` has no longer its version of ``versions``."""
    written, expected = next((t, version) for t, version in zip(tensors, versions) if t._version != version)
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{written.dtype} {list(written.shape)}], part of a quantized weight, is at version {written._version}; "
        f"expected version {expected} instead. It was written to after the forward that used it: "
        "write to it before the forward or after backward"
    )


def is_savable(*tensors: Tensor | None) -> bool:
    """Whether ``ctx.save_for_backward`` takes them: not what was made in inference mode."""
    import torch

    return torch.compiler.is_compiling() or not any(t is not None and t.is_inference() for t in tensors)


class SavedElsewhere:
    """Stands on ``ctx`` where the original backward looks for tensors that are saved with autograd instead."""

    def __init__(self, patch: str) -> None:
        self.__dict__["patch"] = patch

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(f"{vars(self)['patch']} was reverted between forward and backward: run forward again")

    __iter__ = __getattr__ = _refuse
