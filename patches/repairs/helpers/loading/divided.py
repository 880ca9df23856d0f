"""Layers that a map over several devices divides: all of such a layer computes on one of them.

accelerate lets all that waits compute on the first device. Where the rest of the layer is on another, the two halves of
a residual connection would meet on two devices. And it moves the inputs of parts alone, not those of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..offload import hooks
from . import places

if TYPE_CHECKING:
    from torch.nn import Module

    from .places import Place, Places


def devices(model: Module, device_map: Places) -> dict[str, Place]:
    """The layers that have parts on one device, and that device; none if all computes on one."""
    if not _over_several(device_map):
        return {}
    resident = {name: place for name, place in device_map.items() if not places.waits(place)}
    of_layers: dict[str, dict[Any, Place]] = {}
    for name, place in resident.items():
        for layer in _layers_around(model, name):
            of_layers.setdefault(layer, {}).setdefault(places.device(place), places.plain(place))
    return {layer: next(iter(one.values())) for layer, one in of_layers.items() if len(one) == 1}


def _over_several(device_map: Places) -> bool:
    return any(
        places.device(place) != places.device(device_map.main)
        for place in device_map.values()
        if not places.waits(place)
    )


def _layers_around(model: Module, name: str) -> Iterator[str]:
    """The modules around ``name`` that are one of a list."""
    import torch

    while name := name.rpartition(".")[0]:
        if isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.ModuleList):
            yield name


def run(model: Module, device_map: Places, skip_keys: Any) -> None:
    """Have each part that waits compute where its layer does, and move there what goes into the layer."""
    if not _over_several(device_map):
        return
    computes: dict[str, set[Any]] = {}
    for name, place in device_map.items():
        at = device_map.computes_at(name) if places.waits(place) else place
        if places.waits(place) and at != device_map.main:
            _move(model.get_submodule(name), at)
        for layer in _layers_around(model, name):
            computes.setdefault(layer, set()).add(places.device(at))
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer, found in computes.items():
        if len(found) == 1:
            hook = AlignDevicesHook(execution_device=next(iter(found)), skip_keys=skip_keys)
            add_hook_to_module(model.get_submodule(layer), hook, append=True)


def _move(module: Module, place: Place) -> None:
    """Have ``module``, which the hooks of accelerate bring, compute at ``place``."""
    from accelerate.utils import set_module_tensor_to_device

    for part in module.modules():
        for hook in hooks.on(part):
            hook.execution_device = place
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                set_module_tensor_to_device(part, name, place)
