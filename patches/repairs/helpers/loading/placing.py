"""What ``from_pretrained`` does with a weight that it has read, where the device map offloads its layer quantized.

The weight is quantized on the device where its layer computes, as that of a model that fits is. Then its packed
weights go to the CPU or the disk, and the layer is what it would be had it been loaded whole and offloaded afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..int8 import int8_scales
from . import packed_files, places
from .places import Places

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_OFTEN = 4 * 2**20
"""Packed weights in bytes after which freed memory is returned: some milliseconds each time."""


def device_of(get_device: Callable[..., Any], device_map: Any, name: str, model: Any, quantizer: Any) -> Any:
    """Where the tensor of the checkpoint for ``name`` is read to."""
    if isinstance(device_map, Places) and quantizer.param_needs_quantization(model, name):
        if places.is_offloaded(device_map, name.rpartition(".")[0]):
            return device_map.main
    return get_device(device_map, name, valid_torch_device=True)


def folder(load_config: Any, model: Any, index: dict[str, Any] | None) -> str | None:
    """Where ``from_pretrained`` writes what it cannot leave in the checkpoint: a folder of this load's own."""
    device_map = load_config.device_map
    inside: str | None = load_config.disk_offload_folder
    if isinstance(device_map, Places):
        device_map.handled = sys.exc_info()[1]
    if not isinstance(device_map, Places) or "disk" not in device_map.values():
        return inside
    if inside is not None:
        device_map.folder = packed_files.Folder(str(inside))
        return device_map.folder.path
    quantizer = load_config.hf_quantizer
    written = [
        name
        for name, _ in model.named_parameters()
        if _on_disk(device_map, name)
        and (not index or not quantizer.pre_quantized and quantizer.param_needs_quantization(model, name))
    ]
    if written:
        raise ValueError(
            f"The device_map sends {len(written)} weights to the disk ({written[0]!r} is the first), and they have to be "
            f"written there, because they are {'copied' if quantizer.pre_quantized else 'quantized'} while the model is "
            "loaded. Name a folder for them: from_pretrained(..., offload_folder=...), on a disk that can hold them. "
            "The files are removed with the model."
        )
    return None


def _on_disk(device_map: Places, name: str) -> bool:
    return bool(device_map.at(name) == "disk")


def put(put_upstream: Callable[..., None], device_map: Any, model: Any, name: str, weight: Any, *also: Any) -> None:
    """Give ``model`` the ``weight`` that was made, on the CPU if it is to wait there."""
    if isinstance(device_map, Places) and _is_packed(weight):
        _give_back(device_map, weight)
        if places.is_offloaded(device_map, name.rpartition(".")[0]):
            weight = weight.to("cpu")
    put_upstream(model, name, weight, *also)


def put_on_disk(
    upstream: Callable[..., Any], put_upstream: Callable[..., None], device_map: Any, model: Any, quantizer: Any,
    name: str, weight: Any, info: Any, to: str, index: dict[str, Any], mapping: Any,
) -> dict[str, Any]:  # fmt: skip
    """Leave the packed weights of ``weight`` on the disk, and in ``model`` what says how to read them."""
    there = isinstance(device_map, Places) and name in index and _lies_there(quantizer, mapping)
    if not isinstance(device_map, Places) or not _is_packed(weight) and not there:
        written = device_map.folder if isinstance(device_map, Places) else None
        with contextlib.nullcontext() if written is None else written.writing(name, weight):
            result: dict[str, Any] = upstream(name, weight, info, to, index, mapping)
        return result
    from accelerate.utils import set_module_tensor_to_device

    put_upstream(model, name, weight, info, quantizer)
    scales = int8_scales.of(weight)
    if scales is not None:
        device_map.scales[_scales_of(name)] = scales.detach().to("cpu")
    if there:  # in the dtype that the model has it in, which may not be that of the file
        index[name] = {**index[name], "dtype": str(weight.dtype).removeprefix("torch.")}
    else:
        index[name] = _written(device_map, name, weight)
    set_module_tensor_to_device(model, name, "meta")
    _give_back(device_map, weight)
    return index


def _written(device_map: Places, name: str, weight: Tensor) -> packed_files.Entry:
    import torch

    if device_map.folder is None:
        raise ValueError(
            f"The device_map sends {name!r} to the disk, and it has to be written there, because the checkpoint has it in "
            "another form. Name a folder: from_pretrained(..., offload_folder=...)."
        )
    return device_map.folder.write(name, weight.detach().as_subclass(torch.Tensor).to("cpu"))


def _lies_there(quantizer: Any, mapping: Any) -> bool:
    """Whether the checkpoint has the weight as it is: packed, or one that is not quantized."""
    operations = [type(operation).__name__ for operation in getattr(mapping, "operations", ())]
    return bool(quantizer.pre_quantized) and operations in (["Bnb4bitDeserialize"], ["Bnb8bitDeserialize"])


def _give_back(device_map: Places, weight: Tensor) -> None:
    """Return to the system what was freed while weights were quantized to 4 bits on the CPU.

    The C library keeps it: statistics, which stay, lie between what was freed, and it would add up to the whole model.
    """
    if type(weight).__name__ == "Params4bit" and weight.device.type == "cpu":
        device_map.quantized += weight.nbytes
    if device_map.quantized >= _OFTEN:
        device_map.quantized = 0
        with contextlib.suppress(OSError, AttributeError):  # not the C library of GNU
            ctypes.CDLL(None).malloc_trim(0)


def _is_packed(weight: Any) -> bool:
    kind = type(weight).__name__
    return kind == "Params4bit" or kind == "Int8Params" and int8_scales.of(weight) is not None


def _scales_of(name: str) -> str:
    return f"{name.rpartition('.')[0]}.SCB"


def ended(device_map: Any) -> None:
    """Called when all weights are read, or something has gone wrong: then what was written is removed."""
    if isinstance(device_map, Places):
        error, before, device_map.handled = sys.exc_info()[1], device_map.handled, None
        if device_map.folder is not None and error is not before:
            device_map.folder.remove()


def dispatch(dispatch_model: Callable[..., Any], model: Any, options: dict[str, Any]) -> Any:
    """``accelerate.dispatch_model`` of a model whose layers are where they are to be."""
    device_map = options["device_map"]
    if not isinstance(device_map, Places):
        return dispatch_model(model, **options)
    index = options["offload_index"]
    options = {
        **options,
        "device_map": dict(device_map),
        "main_device": device_map.main,
        "force_hooks": True,
        "offload_index": None if index is None else packed_files.Index(index, device_map.folder),
        "state_dict": _in_memory(model, device_map, index or {}),
    }
    result = dispatch_model(model, **options)
    model.hf_device_map = dict(device_map.given)
    return result


def _in_memory(model: Module, device_map: Places, index: dict[str, Any]) -> dict[str, Tensor] | None:
    """What the hooks bring from CPU memory."""
    kept: dict[str, Tensor] = dict(device_map.scales)
    waiting = [name for name, place in device_map.items() if place == "cpu"]
    if places.device(device_map.main).type != "cpu":
        for name in waiting:
            kept.update(model.get_submodule(name).state_dict(prefix=f"{name}."))
    for name, parameter in model.named_parameters():
        if _on_disk(device_map, name) and name not in index and not parameter.is_meta:
            kept[name] = parameter.detach()  # the checkpoint has none: it was initialized
    return kept or None
