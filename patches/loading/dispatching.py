"""Hanging accelerate's hooks on a model whose layers are where they wait, and what accelerate takes for one weight there.

accelerate tells weights that are one by their address, which is 0 for all on meta.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..experts import experts_on_disk
from ..offload import offload_map, weight_files, weights_maps
from ..offload.offload_map import OffloadMap
from . import offload_v5, placement_summary, split_layers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def dispatch_offloaded(dispatch_model: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
    """Call ``accelerate.dispatch_model`` for a model whose layers are where they wait."""
    device_map = options["device_map"]
    if not isinstance(device_map, OffloadMap):
        return dispatch_model(model, **options)
    index = options["offload_index"]
    for parameter in model.parameters():
        offload_v5.forget_initialized(parameter)
    tied = _untie_on_disk(model, index or {})
    in_memory = _tensors_in_memory(model, device_map, index or {})
    if index is not None:
        index = weight_files.Index(index, device_map.folder, device_map.prefetch_window)
        in_memory = experts_on_disk.ExpertsMap(in_memory or {}, index) or None
    options = {
        **options,
        "device_map": dict(device_map),
        "main_device": device_map.main,
        "force_hooks": True,
        "offload_index": index,
        "state_dict": in_memory,
    }
    with _one_name_each(model, device_map):
        result = dispatch_model(model, **options)
    for module, name, owner, source in tied:
        module._parameters[name] = owner._parameters[source]
    split_layers.compute_on_one_device(model, device_map, options.get("skip_keys"))
    for loader in weights_maps.find_loaders(model):
        # Not to the device at once: accelerate takes a quantized weight from there to the CPU, and there again.
        loader.device = None
    model.hf_device_map = dict(device_map.given)
    placement_summary.log_placement(model, device_map)
    return result


def needs_hooks(device_map: Any) -> bool:
    """Tell whether some layers of a quantized model wait for each use, so that it needs hooks."""
    return isinstance(device_map, OffloadMap)


def without_meta_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``state`` whose address tells whether they are tied."""
    return {name: tensor for name, tensor in state.items() if not tensor.is_meta}


def _tensors_in_memory(model: Module, device_map: OffloadMap, index: dict[str, Any]) -> dict[str, Tensor] | None:
    """Return the tensors that the hooks bring from CPU memory."""
    kept: dict[str, Tensor] = dict(device_map.scales)
    waiting = [name for name, place in device_map.items() if place == "cpu"]
    if offload_map.to_torch_device(device_map.main).type != "cpu":
        for name in waiting:
            kept.update(model.get_submodule(name).state_dict(prefix=f"{name}."))
    for name, parameter in model.named_parameters():
        if offload_v5.is_on_disk(device_map, name) and name not in index and not parameter.is_meta:
            kept[name] = parameter.detach()  # the checkpoint has none: it was initialized
    return kept or None


def _untie_on_disk(model: Module, index: dict[str, Any]) -> list[tuple[Module, str, Module, str]]:
    """Give weights that are tied and on meta a parameter each, and return which are to be one again.

    accelerate before 1.14 would take all weights on meta for tied ones.
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
def _one_name_each(model: Module, device_map: OffloadMap) -> Iterator[None]:
    """Leave each offloaded module one of its names: T5 before transformers 5 has its embedding in encoder and decoder, too.

    accelerate gives a module a hook for each name, and each would bring its weights.
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
