"""Layers that a map over several devices divides: all of such a layer computes on one of them.

accelerate lets all that waits compute on the first device. Where the rest of the layer is on another, the two halves of
a residual connection would meet on two devices. And it moves the inputs of parts alone, not the inputs of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..offload import offload_map
from ..quantized import accelerate_hooks

if TYPE_CHECKING:
    from torch.nn import Module

    from ..offload.offload_map import OffloadMap, Place


def devices_of_split_layers(model: Module, device_map: OffloadMap) -> dict[str, Place]:
    """Return the layers whose resident parts are on one of several devices, each with that device."""
    if not _over_several(device_map):
        return {}
    resident = {name: place for name, place in device_map.items() if not offload_map.is_offloaded_place(place)}
    of_layers: dict[str, dict[Any, Place]] = {}
    for name, place in resident.items():
        for layer in _layers_around(model, name):
            of_layers.setdefault(layer, {}).setdefault(
                offload_map.to_torch_device(place), offload_map.to_plain_place(place)
            )
    return {layer: next(iter(one.values())) for layer, one in of_layers.items() if len(one) == 1}


def _over_several(device_map: OffloadMap) -> bool:
    return any(
        offload_map.to_torch_device(place) != offload_map.to_torch_device(device_map.main)
        for place in device_map.values()
        if not offload_map.is_offloaded_place(place)
    )


def _layers_around(model: Module, name: str) -> Iterator[str]:
    """Yield the modules around ``name`` that are in a ``ModuleList``."""
    import torch

    while name := name.rpartition(".")[0]:
        if isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.ModuleList):
            yield name


def compute_on_one_device(model: Module, device_map: OffloadMap, skip_keys: Any) -> None:
    """Have each part that waits compute where its layer does, and move the inputs of the layer there."""
    if not _over_several(device_map):
        return
    computes: dict[str, set[Any]] = {}
    for name, place in device_map.items():
        at = device_map.computes_at(name) if offload_map.is_offloaded_place(place) else place
        if offload_map.is_offloaded_place(place) and at != device_map.main:
            _move(model.get_submodule(name), at)
        for layer in _layers_around(model, name):
            computes.setdefault(layer, set()).add(offload_map.to_torch_device(at))
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer, found in computes.items():
        if len(found) == 1:
            hook = AlignDevicesHook(execution_device=next(iter(found)), skip_keys=skip_keys)
            add_hook_to_module(model.get_submodule(layer), hook, append=True)


def _move(module: Module, place: Place) -> None:
    """Have ``module``, which the hooks of accelerate bring, compute at ``place``."""
    from accelerate.utils import set_module_tensor_to_device

    for part in module.modules():
        for hook in accelerate_hooks.hooks_on(part):
            hook.execution_device = place
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                set_module_tensor_to_device(part, name, place)
