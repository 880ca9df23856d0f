"""The tensors of a model that accelerate offloads, for a state dict in which they are on meta."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..quantized import accelerate_hooks
from . import offloaded_modules, weights_maps

if TYPE_CHECKING:
    from torch import Tensor


def fill_in(model: Any, state: dict[str, Tensor], wanted: Collection[str], away: Collection[str]) -> None:
    """Put the tensors of offloaded modules into ``state``, a copy of each in CPU memory.

    ``away`` are the names that are on meta there. A module that has one of ``wanted`` is brought to its device, one
    module at a time, with the row scales of INT8, which are in no state dict once an offloaded layer has run.
    """
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if accelerate_hooks.hook_of(module) is None or not any(each.startswith(prefix) for each in wanted):
            continue
        with offloaded_modules.onload(module):
            brought = module.state_dict(prefix=prefix)
            new = {name: tensor for name, tensor in brought.items() if name in away or name not in state}
            state.update((name, tensor.to("cpu")) for name, tensor in new.items())
    tied = weights_maps.restore_ties(model)  # after all modules were visited, which gives each a parameter of its own
    state.update((name, state[source]) for name, source in tied.items() if name in state and not state[source].is_meta)
