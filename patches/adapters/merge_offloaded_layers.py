"""Merging and unmerging adapters of layers that accelerate offloads: their weights are brought, and offloaded changed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..offload import offloaded_modules

if TYPE_CHECKING:
    from torch.nn import Module


def onload_for_merge(layer: Module) -> AbstractContextManager[None]:
    """Bring the offloaded modules below ``layer`` to their device, and offload what changes, if peft may merge ``layer``."""
    merges = hasattr(layer, "base_layer") or hasattr(layer, "unload_and_optionally_merge_module")
    return offloaded_modules.onload_to_change(layer) if merges else nullcontext()


def merge_onloaded(layer: Any, options: dict[str, Any]) -> None:
    """Call ``layer.merge(**options)`` while the weights of ``layer`` are there, and offload what changes."""
    with onload_for_merge(layer):
        layer.merge(**options)


def unmerge_onloaded(layer: Any) -> None:
    """Call ``layer.unmerge()`` while the weights of ``layer`` are there, and offload what changes."""
    with onload_for_merge(layer):
        layer.unmerge()
