"""Weights and modules that a model has under several names, while accelerate hangs its hooks on it.

accelerate tells weights that are one by their address, which is 0 for all on meta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..offload import offload_map

if TYPE_CHECKING:
    from torch.nn import Module

    from ..offload.offload_map import OffloadMap


def untie_on_disk(model: Module, index: dict[str, Any]) -> list[tuple[Module, str, Module, str]]:
    """Give weights that are tied and on meta a parameter each, and say which are to be one again.

    accelerate before 1.14 knows tied weights by their address, which is 0 for all on meta: it would take each for each.
    """
    first: dict[int, tuple[str, Module, str]] = {}
    tied = []
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            name = f"{path}.{own}" if path else own
            source, *owner = first.setdefault(id(parameter), (name, module, own))
            if source != name:
                module._parameters[own] = type(parameter)(parameter.detach().clone(), requires_grad=False)
                if source in index:
                    index.setdefault(name, index[source])
                tied.append((module, own, *owner))
    return tied


@contextlib.contextmanager
def keep_one_name(model: Module, device_map: OffloadMap) -> Iterator[None]:
    """Leave each offloaded module one of its names: T5 before transformers 5 has its embedding in encoder and decoder, too.

    accelerate gives a module a hook for each name: its weights are brought by each, and their address on meta equals that of
    all others.
    """
    import torch

    first: dict[int, str] = {}
    again: dict[str, Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if first.setdefault(id(module), path) != path and offload_map.offloads_module(device_map, path):
            again[path] = module
    hidden = [
        (model.get_submodule(parent)._modules, own, again[f"{parent}.{own}" if parent else own])
        for parent, _, own in (path.rpartition(".") for path in again)
        if parent not in again
    ]
    try:
        for modules, own, _ in hidden:
            modules[own] = torch.nn.Module()
        yield
    finally:
        for modules, own, module in hidden:
            modules[own] = module
