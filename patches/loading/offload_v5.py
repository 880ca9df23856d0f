"""What ``from_pretrained`` does with a weight that it has read, where the device map offloads its layer quantized.

The weight is quantized on the device where its layer computes, as in a model that fits. Then its packed
weights go to the CPU or the disk, and the layer is as if it had been loaded whole and offloaded afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config.quantizers import makes_parameter
from ..experts import experts_on_disk, quantize_request
from ..experts.experts_in_model import is_expert_parameter
from ..offload import offload_map, weight_files, weights_maps
from ..offload.offload_map import OffloadMap
from ..process import malloc_trim
from ..quantized.int8 import row_scales
from ..quantized.quantized_experts import is_quantized_experts
from ..quantized.weights.parameter_copies import make_like
from . import device_maps, duplicate_names, placement_summary, split_layers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def read_device(get_device: Callable[..., Any], device_map: Any, name: str, model: Any, quantizer: Any) -> Any:
    """Where the tensor of the checkpoint for ``name`` is read to."""
    if isinstance(device_map, OffloadMap) and offload_map.offloads_module(device_map, name.rpartition(".")[0]):
        at = device_map.computes_at(name)
        if at == "cpu":  # so it is for unquantized weights, too
            return at
        if quantizer.param_needs_quantization(model, name) or _are_experts_to_quantize(model, name, quantizer):
            return at
    return get_device(device_map, name, valid_torch_device=True)


def _are_experts_to_quantize(model: Any, name: str, quantizer: Any) -> bool:
    if quantizer.pre_quantized or not quantize_request.is_requested():
        return False
    parameter = device_maps.owner_of_tensor(model, name)._parameters.get(name.rpartition(".")[2])
    return parameter is not None and is_expert_parameter(model, name, parameter)


def offload_folder(load_config: Any, model: Any, index: dict[str, Any] | None) -> str | None:
    """Where ``from_pretrained`` writes the weights that it cannot leave in the checkpoint: a folder of this load's own."""
    device_map = load_config.device_map
    inside: str | None = load_config.disk_offload_folder
    if isinstance(device_map, OffloadMap):
        device_map.handled = sys.exc_info()[1]
    if not isinstance(device_map, OffloadMap) or "disk" not in device_map.values():
        return inside
    return open_folder(device_map, model, load_config.hf_quantizer, inside, in_safetensors=bool(index))


def open_folder(device_map: OffloadMap, model: Any, quantizer: Any, inside: Any, in_safetensors: bool) -> str | None:
    """A folder for written weights, inside the one that the user names; an error if there is none and it is needed."""
    if inside is not None:
        device_map.folder = weight_files.Folder(str(inside))
        return device_map.folder.path
    written = [
        name
        for name, _ in model.named_parameters()
        if is_on_disk(device_map, name)
        and (not in_safetensors or not quantizer.pre_quantized and makes_parameter(quantizer, model, name))
    ]
    if written:
        raise ValueError(
            f"The device_map sends {len(written)} weights to the disk ({written[0]!r} is the first). They have to be "
            f"written there, because they are {'copied' if quantizer.pre_quantized else 'quantized'} while the model is "
            "loaded. Name a folder that has room for them: from_pretrained(..., offload_folder=...). The files are removed "
            "with the model."
        )
    return None


def is_on_disk(device_map: OffloadMap, name: str) -> bool:
    """Whether ``name`` waits on the disk."""
    return bool(device_map.at(name) == "disk")


def is_left_on_disk(
    device_map: Any, quantizer: Any, name: str, weight: Any, mapping: Any, index: dict[str, Any]
) -> bool:
    """Whether :func:`set_and_offload` leaves ``weight`` on the disk, and transformers does not.

    It does so with packed weights, and with all that it need not copy from a checkpoint that is quantized already.
    """
    if not isinstance(device_map, OffloadMap):
        return False
    there = name in index and _lies_there(quantizer, mapping)
    if name in index:  # in the dtype that the model has it in, which may differ from the file's
        index[name] = {**index[name], "dtype": str(weight.dtype).removeprefix("torch.")}
    if is_packed(weight) and not there:
        index[name] = write_to_folder(device_map, name, weight)
    return there or is_packed(weight)


def reads_one_at_a_time(asked: bool, device_map: Any) -> bool:
    """Whether each tensor is read when it is its turn: threads would bring all that is offloaded to the device at once."""
    return asked or isinstance(device_map, OffloadMap)


def set_and_offload(upstream: Callable[..., None], device_map: Any) -> Callable[..., None]:
    """``set_param_for_module``: it gives a model the weight that was made, which goes to where it is to wait."""
    if not isinstance(device_map, OffloadMap):
        return upstream

    def set_param_for_module(model: Any, name: str, weight: Any, *also: Any) -> None:
        path, _, own = name.rpartition(".")
        leaves = is_on_disk(device_map, name) and own in device_maps.owner_of_tensor(model, name)._parameters
        if is_packed(weight) and not leaves and offload_map.offloads_module(device_map, path):
            weight = to_cpu_parameter(weight)
        upstream(model, name, weight, *also)
        if leaves:
            take_out_of_model(device_map, model, name, weight)
        if is_packed(weight):
            malloc_trim.trim_after_quantizing(weight)

    return set_param_for_module


def to_cpu_parameter(weight: Any) -> Any:
    """A parameter of packed weights, there."""
    moved = weight.to("cpu")
    if is_quantized_experts(weight):
        import torch

        return torch.nn.Parameter(moved, requires_grad=False)
    return moved


def resave_or_explain(upstream: Callable[..., Any], device_map: Any) -> Callable[..., Any]:
    """``offload_and_maybe_resave_param``; what cannot be written says which weight, and where."""
    if not isinstance(device_map, OffloadMap) or device_map.folder is None:
        return upstream
    writing = device_map.folder.writing

    def offload_and_maybe_resave_param(name: str, weight: Any, *also: Any) -> Any:
        with writing(name, weight):
            return upstream(name, weight, *also)

    return offload_and_maybe_resave_param


def take_out_of_model(device_map: OffloadMap, model: Module, name: str, weight: Any) -> None:
    """Take ``weight``, which lies on the disk, out of ``model``; row scales stay in memory."""
    from accelerate.utils import set_module_tensor_to_device

    scales = row_scales.get_scales(weight)
    if scales is not None:
        device_map.scales[device_map.root + _scales_of(name)] = scales.detach().to("cpu")
    module, own = device_maps.owner_of_tensor(model, name), name.rpartition(".")[2]
    old: Any = module._parameters[own]
    if type(old).__name__ in ("Params4bit", "Int8Params"):
        module._parameters[own] = _on_meta(old)
    else:
        _unmark(old)
        set_module_tensor_to_device(module, own, "meta")
    vars(module._parameters[own])["_is_hf_initialized"] = True


def _on_meta(packed: Any) -> Any:
    """``packed`` there, as accelerate moves it, in one step: it makes several parameters on the way."""
    import torch

    empty = torch.empty_strided(packed.shape, packed.stride(), dtype=packed.dtype, device="meta")
    held: dict[str, Any] = {key: value.to("meta") for key, value in vars(packed).items() if torch.is_tensor(value)}
    if "module" in vars(packed):
        held["module"] = None  # that would quantize it
    return make_like(packed, empty, **held)


def _unmark(weight: Tensor) -> None:
    """Take off what transformers notes on a weight: accelerate before 1.14 makes another weight of all its attributes."""
    vars(weight).pop("_is_hf_initialized", None)


def write_to_folder(device_map: OffloadMap, name: str, weight: Tensor) -> weight_files.Entry:
    """Write ``weight`` to the folder of this load."""
    import torch

    if device_map.folder is None:
        raise ValueError(
            f"The device_map sends {name!r} to the disk. It has to be written there, because it differs from what the "
            "checkpoint holds. Name a folder for it: from_pretrained(..., offload_folder=...)."
        )
    if is_quantized_experts(weight):
        return experts_on_disk.write_experts(device_map.folder, device_map.root + name, weight)
    return device_map.folder.write(device_map.root + name, weight.detach().as_subclass(torch.Tensor).to("cpu"))


def _lies_there(quantizer: Any, mapping: Any) -> bool:
    """Whether the checkpoint has the weight as it is: packed, or one that is not quantized."""
    operations = [type(operation).__name__ for operation in getattr(mapping, "operations", ())]
    return bool(quantizer.pre_quantized) and operations in (["Bnb4bitDeserialize"], ["Bnb8bitDeserialize"])


def is_packed(weight: Any) -> bool:
    """Whether ``weight`` is, or will be, packed weights with all their statistics."""
    kind = type(weight).__name__
    return (
        kind == "Params4bit"
        or is_quantized_experts(weight)
        or kind == "Int8Params"
        and row_scales.get_scales(weight) is not None
    )


def _scales_of(name: str) -> str:
    return f"{name.rpartition('.')[0]}.SCB"


def end_loading(device_map: Any) -> None:
    """Called when all weights are read, or something has gone wrong: then what was written is removed."""
    if isinstance(device_map, OffloadMap):
        error, before, device_map.handled = sys.exc_info()[1], device_map.handled, None
        if device_map.folder is not None and error is not before:
            device_map.folder.remove()


def dispatch_offloaded(dispatch_model: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
    """``accelerate.dispatch_model`` of a model whose layers are where they are to be."""
    device_map = options["device_map"]
    if not isinstance(device_map, OffloadMap):
        return dispatch_model(model, **options)
    index = options["offload_index"]
    for parameter in model.parameters():
        _unmark(parameter)
    tied = duplicate_names.untie_on_disk(model, index or {})
    in_memory = _in_memory(model, device_map, index or {})
    if index is not None:
        index = weight_files.Index(index, device_map.folder, device_map.ahead)
        in_memory = experts_on_disk.ExpertsMap(in_memory or {}, index) or None
    options = {
        **options,
        "device_map": dict(device_map),
        "main_device": device_map.main,
        "force_hooks": True,
        "offload_index": index,
        "state_dict": in_memory,
    }
    with duplicate_names.keep_one_name(model, device_map):
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
    """Whether some layers of a quantized model wait for each use, so that it needs hooks."""
    return isinstance(device_map, OffloadMap)


def without_meta_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of ``state`` has an address by which tied weights can be told."""
    return {name: tensor for name, tensor in state.items() if not tensor.is_meta}


def _in_memory(model: Module, device_map: OffloadMap, index: dict[str, Any]) -> dict[str, Tensor] | None:
    """What the hooks bring from CPU memory."""
    kept: dict[str, Tensor] = dict(device_map.scales)
    waiting = [name for name, place in device_map.items() if place == "cpu"]
    if offload_map.to_torch_device(device_map.main).type != "cpu":
        for name in waiting:
            kept.update(model.get_submodule(name).state_dict(prefix=f"{name}."))
    for name, parameter in model.named_parameters():
        if is_on_disk(device_map, name) and name not in index and not parameter.is_meta:
            kept[name] = parameter.detach()  # the checkpoint has none: it was initialized
    return kept or None
