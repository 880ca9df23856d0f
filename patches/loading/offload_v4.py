"""What transformers 4 and diffusers do in ``from_pretrained`` with a weight that was read, where its layer is offloaded.

Their loaders take one tensor after another, and know nothing of packed weights on the disk. The statistics of a
quantized checkpoint come with the weight in diffusers and up to transformers 4.56, and one by one from 4.57 on. A layer
goes to where it waits when it has all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..config.quantizers import makes_parameter
from ..offload import offload_map
from ..offload.offload_map import OffloadMap, Place
from ..process import malloc_trim
from . import checkpoint_keys, chunked_quantization, device_maps, offload_v5

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def load_files(upstream: Callable[..., Any], device_map: Any) -> Callable[..., Any]:
    """Return ``_load_pretrained_model``, which reads the files; if that fails, remove the files that were written."""
    if not isinstance(device_map, OffloadMap):
        return upstream

    def _load_pretrained_model(model: Module, state_dict: Any, files: Any, *also: Any, **options: Any) -> Any:
        if files:  # before upstream reads a pickled one, and says that it may be of TensorFlow
            checkpoint_keys.check_whole_files(list(map(str, files)))
        in_safetensors = bool(files) and str(files[0]).endswith(".safetensors")
        if files is None and state_dict is not None:
            files = [""]  # so does transformers where a map has no disk
        inside, quantizer = options["disk_offload_folder"], options["hf_quantizer"]
        with open_folder(device_map, model, quantizer, inside, in_safetensors):
            *found, _, errors = upstream(model, state_dict, files, *also, **options)
        return (*found, device_map.index or None, errors)

    return _load_pretrained_model


@contextlib.contextmanager
def open_folder(
    device_map: OffloadMap, model: Module, quantizer: Any, inside: Any, in_safetensors: bool
) -> Iterator[None]:
    """Have a folder for what is written while loading, if the map has a disk; an error of loading removes it."""
    if "disk" in device_map.values():
        offload_v5.open_folder(device_map, model, quantizer, inside, in_safetensors)
    try:
        yield
    except BaseException:
        if device_map.folder is not None:
            device_map.folder.remove()
        raise


def expand_device_map(upstream: Callable[..., Any], device_map: Any, names: Iterable[str]) -> Any:
    """Call ``expand_device_map``; a tensor that the model does not have is nowhere."""
    if not isinstance(device_map, OffloadMap):
        return upstream(device_map, names)
    return {name: device_map.at(name) for name in names}


def files_to_skip(upstream: Callable[..., Any], device_map: Any, files: Any) -> Any:
    """Call ``get_disk_only_shard_files`` for files that need not be read; none, as packed weights have statistics to read."""
    return [] if isinstance(device_map, OffloadMap) else upstream(device_map, files)


def device_map_within(device_map: Any, prefix: str) -> Any:
    """Return ``device_map`` by the names of the base model, whose checkpoint is loaded into a model with a head."""
    inside = {name.removeprefix(prefix): place for name, place in device_map.items()}
    if not isinstance(device_map, OffloadMap):
        return inside
    if prefix.rstrip(".") in inside:
        inside[""] = inside.pop(prefix.rstrip("."))
    view = OffloadMap(inside, device_map.given)
    split = {name.removeprefix(prefix): place for name, place in device_map.devices_of_split_layers.items()}
    vars(view).update(vars(device_map), root=prefix, devices_of_split_layers=split)
    return view


def place_tensor(
    device_map: Any, model: Module, name: str, tensor: Tensor, quantizer: Any, files: Any, load: Any, *also: Any
) -> bool:
    """Give ``model`` the tensor ``name``, and put it where it waits; return False where transformers is to do it.

    ``files`` has the tensors that lie in a file of the checkpoint, ``load`` sets a parameter, ``also`` is for the quantizer.
    """
    if not isinstance(device_map, OffloadMap):
        return False

    def create(where: Place) -> None:
        if also:  # up to 4.56, where it raises an error for a checkpoint without statistics
            quantizer.check_quantized_param(model, tensor, name, *also[:1])
        chunked_quantization.create_in_chunks(quantizer, tensor)(model, tensor, name, where, *also)

    place_or_create(device_map, model, name, tensor, quantizer, files, load, create)
    return True


def place_or_create(
    device_map: OffloadMap,
    model: Module,
    name: str,
    tensor: Tensor,
    quantizer: Any,
    files: Any,
    load: Callable[[Module, str, Tensor], None],
    create: Callable[[Place], None],
) -> None:
    """Give ``model`` the tensor ``name``, and put it where it waits.

    ``load`` sets a tensor as it is; ``create`` has the quantizer make the parameter on a device.
    """
    if not makes_parameter(quantizer, model, name):
        at = device_map.at(name)
        load(model, name, tensor.to("cpu" if at == "disk" else at))
        if at == "disk" and name.rpartition(".")[2] in device_maps.owner_of_tensor(model, name)._parameters:
            _leave_on_disk(device_map, model, name, tensor, files)
        return
    weight = _weight_of(quantizer, name)
    offloaded = offload_map.offloads_module(device_map, weight)
    create(device_map.computes_at(weight) if offloaded else device_map.at(weight))
    made = device_maps.owner_of_tensor(model, weight)._parameters["weight"] if offloaded else None
    if made is not None and not made.is_meta and offload_v5.is_packed(made):
        if offload_v5.is_on_disk(device_map, weight):
            _leave_on_disk(device_map, model, weight, made, files if quantizer.pre_quantized else None)
        elif made.device.type != "cpu":
            device_maps.owner_of_tensor(model, weight)._parameters["weight"] = made.to("cpu")  # type: ignore[assignment]
        malloc_trim.trim_after_quantizing(made)


def is_placed(device_map: Any, is_safetensors: bool) -> bool:
    """Tell whether a tensor on the disk needs no further step: it lies in a safetensors file, or :func:`place_tensor` wrote it."""
    return is_safetensors or isinstance(device_map, OffloadMap)


def _weight_of(quantizer: Any, name: str) -> str:
    """Return the name of the weight that ``name`` is or belongs to."""
    if hasattr(quantizer, "get_param_name"):  # from 4.57 on
        name = quantizer.get_param_name(name)
    return f"{name.rpartition('.')[0]}.weight"


def _leave_on_disk(device_map: OffloadMap, model: Module, name: str, tensor: Tensor, files: Any) -> None:
    """Leave ``tensor`` on the disk: in the checkpoint where that has it, or else in a file of its own."""
    if files and name in files:
        entry = {**files[name], "dtype": str(tensor.dtype).removeprefix("torch.")}
    else:
        entry = offload_v5.write_to_folder(device_map, name, tensor)
    device_map.index[device_map.root + name] = entry
    offload_v5.take_out_of_model(device_map, model, name, tensor)
