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
from ..offload import offload_map, weight_files
from ..offload.offload_map import OffloadMap
from ..process import malloc_trim
from ..quantized.int8 import row_scales
from ..quantized.quantized_experts import is_quantized_experts
from ..quantized.weights.parameter_copies import make_like
from . import device_maps

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def read_device(get_device: Callable[..., Any], device_map: Any, name: str, model: Any, quantizer: Any) -> Any:
    """Return the device that the tensor of the checkpoint for ``name`` is read to."""
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
    """Make a folder of this load's own for the weights that cannot stay in the checkpoint, if there are any."""
    device_map = load_config.device_map
    inside: str | None = load_config.disk_offload_folder
    if isinstance(device_map, OffloadMap):
        device_map.handled_error = sys.exc_info()[1]
    if not isinstance(device_map, OffloadMap) or "disk" not in device_map.values():
        return inside
    return open_folder(device_map, model, load_config.hf_quantizer, inside, in_safetensors=bool(index))


def open_folder(device_map: OffloadMap, model: Any, quantizer: Any, inside: Any, in_safetensors: bool) -> str | None:
    """Make a folder for written weights inside the one that the user names; raise if there is none and it is needed."""
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
    """Tell whether ``name`` waits on the disk."""
    return bool(device_map.at(name) == "disk")


def is_left_on_disk(
    device_map: Any, quantizer: Any, name: str, weight: Any, mapping: Any, index: dict[str, Any]
) -> bool:
    """Tell whether :func:`set_and_offload` leaves ``weight`` on the disk, and transformers does not.

    It does so with packed weights, and with every tensor that can stay in a checkpoint that is quantized already.
    """
    if not isinstance(device_map, OffloadMap):
        return False
    # In a quantized checkpoint a weight lies as it is: packed, or one that is not quantized.
    operations = [type(operation).__name__ for operation in getattr(mapping, "operations", ())]
    unchanged = bool(quantizer.pre_quantized) and operations in (["Bnb4bitDeserialize"], ["Bnb8bitDeserialize"])
    there = name in index and unchanged
    if name in index:  # in the dtype that the model has it in, which may differ from the file's
        index[name] = {**index[name], "dtype": str(weight.dtype).removeprefix("torch.")}
    if is_packed(weight) and not there:
        index[name] = write_to_folder(device_map, name, weight)
    return there or is_packed(weight)


def reads_one_at_a_time(asked: bool, device_map: Any) -> bool:
    """Tell whether to read each tensor when it is its turn: threads would bring all offloaded ones to the device at once."""
    return asked or isinstance(device_map, OffloadMap)


def set_and_offload(upstream: Callable[..., None], device_map: Any) -> Callable[..., None]:
    """Return ``set_param_for_module``, which gives a model the weight that was made; the weight goes to where it waits."""
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
    """Move a parameter of packed weights to the CPU."""
    moved = weight.to("cpu")
    if is_quantized_experts(weight):
        import torch

        return torch.nn.Parameter(moved, requires_grad=False)
    return moved


def resave_or_explain(upstream: Callable[..., Any], device_map: Any) -> Callable[..., Any]:
    """Return ``offload_and_maybe_resave_param``; if a weight cannot be written, an error says which one, and where."""
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
        device_map.scales[f"{device_map.root}{name.rpartition('.')[0]}.SCB"] = scales.detach().to("cpu")
    module, own = device_maps.owner_of_tensor(model, name), name.rpartition(".")[2]
    old: Any = module._parameters[own]
    if type(old).__name__ in ("Params4bit", "Int8Params"):
        module._parameters[own] = _on_meta(old)
    else:
        forget_initialized(old)
        set_module_tensor_to_device(module, own, "meta")
    vars(module._parameters[own])["_is_hf_initialized"] = True


def _on_meta(packed: Any) -> Any:
    """Move ``packed`` to meta as accelerate does, which makes several parameters on the way, in one step."""
    import torch

    empty = torch.empty_strided(packed.shape, packed.stride(), dtype=packed.dtype, device="meta")
    held: dict[str, Any] = {key: value.to("meta") for key, value in vars(packed).items() if torch.is_tensor(value)}
    if "module" in vars(packed):
        held["module"] = None  # that would quantize it
    return make_like(packed, empty, **held)


def forget_initialized(weight: Tensor) -> None:
    """Remove the mark of transformers on a weight: accelerate before 1.14 makes another weight of all its attributes."""
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


def is_packed(weight: Any) -> bool:
    """Tell whether ``weight`` is, or will be, packed weights with all their statistics."""
    kind = type(weight).__name__
    return (
        kind == "Params4bit"
        or is_quantized_experts(weight)
        or kind == "Int8Params"
        and row_scales.get_scales(weight) is not None
    )


def end_loading(device_map: Any) -> None:
    """Remove the folder of this load if an error ends it; do nothing if all weights were read."""
    if isinstance(device_map, OffloadMap):
        error, before, device_map.handled_error = sys.exc_info()[1], device_map.handled_error, None
        if device_map.folder is not None and error is not before:
            device_map.folder.remove()
