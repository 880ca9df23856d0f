"""The maps that accelerate's offload hooks bring weights from: which weights are one in them, and writing to them.

Such a map is a dict of tensors, or an ``OffloadedWeightsLoader`` with a dict for tensors in memory and an index for
tensors on disk, and often one of them with a prefix before each name. The files on disk may be the checkpoint that the
user loaded, so no file that is there is ever written to: a changed tensor gets a file of its own in a folder of its
own, and the index leads to it. The folder goes when the process ends.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Hashable, MutableMapping
from typing import TYPE_CHECKING, Any

from ..process.tensor_bits import have_same_bits
from ..quantized import accelerate_hooks
from ..quantized.int8 import row_scales
from ..quantized.quantized_experts import is_quantized_experts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_counter = itertools.count()


def find_loaders(model: Module) -> list[Any]:
    """Return the maps of the hooks in ``model`` that have an index of tensors on the disk, each once."""
    found = {}
    for module in model.modules():
        for hook in accelerate_hooks.hooks_on(module):
            weights = getattr(hook, "weights_map", None)
            weights = getattr(weights, "dataset", weights)
            if hasattr(weights, "index"):
                found[id(weights)] = weights
    return list(found.values())


def map_and_key(hook: Any, name: str) -> Hashable:
    """Return where ``hook`` brings ``name`` from, which only tied weights have in common; None if nothing tells."""
    weights, key = _without_prefix(hook.weights_map, name)
    kept = getattr(weights, "state_dict", weights)
    if isinstance(kept, dict) and key in kept:
        tensor = dict.__getitem__(kept, key)  # as it is kept: a dict of ours reads experts from the disk
        return (tensor.data_ptr(), tensor.stride()) if hasattr(tensor, "data_ptr") and tensor.numel() else None
    entry = getattr(weights, "index", {}).get(key, {})
    file = entry.get("safetensors_file")
    return file and (file, entry.get("weight_name", key))


def _without_prefix(weights: Any, name: str) -> tuple[Any, str]:
    """Return the map inside ``weights``, if that puts a prefix before each name, and the ``name`` there."""
    return (weights.dataset, weights.prefix + name) if hasattr(weights, "prefix") else (weights, name)


def restore_ties(model: Module) -> dict[str, str]:
    """Give modules whose parameters on meta are brought from the same place the same parameter.

    accelerate gives a module a new parameter on meta after its forward. Of two modules that share one, each gets its own,
    and then only the place that both are brought from tells that these are one weight. Return for each name its source.
    """
    first: dict[Hashable, tuple[str, Any]] = {}
    tied = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hook = accelerate_hooks.hook_of(module)
        for name, parameter in module._parameters.items() if hook is not None else ():
            place = map_and_key(hook, name) if parameter is not None and parameter.is_meta else None
            if parameter is None or place is None:
                continue
            full = f"{path}.{name}" if path else name
            source, module._parameters[name] = first.setdefault(
                (place, type(parameter), parameter.dtype, parameter.shape), (full, parameter)
            )
            if source != full:
                tied[full] = source
    return tied


def write_to_map(hook: Any, name: str, tensor: Tensor) -> None:
    """Make ``tensor`` what ``hook`` brings for ``name`` from now on, with its row scales if it is an INT8 weight."""
    if is_quantized_experts(tensor):
        return _put(hook, name, tensor.detach().to("cpu"))
    scales = row_scales.get_scales(tensor)
    beside = name.replace("weight", "SCB")
    if scales is not None and beside in hook.weights_map:
        _put(hook, beside, scales.detach().to("cpu"))
    elif scales is not None:  # then the map holds the parameter itself
        return _put(hook, name, tensor.detach().to("cpu"))
    import torch

    _put(hook, name, tensor.detach().as_subclass(torch.Tensor).to("cpu"))


def _put(hook: Any, name: str, tensor: Tensor) -> None:
    weights, key = _without_prefix(hook.weights_map, name)
    if isinstance(weights, MutableMapping):
        _put_in_memory(weights, key, tensor)
    elif key in getattr(weights, "state_dict", ()):
        _put_in_memory(weights.state_dict, key, tensor)
    elif key in getattr(weights, "index", ()):
        names = _names_of_tensor(weights, key)
        _refuse_tied(weights, key, names)
        weights.index.update(dict.fromkeys(names, _write_to_disk(weights, key, tensor)))
    else:  # a map of someone else's: its entries for other tensors stay
        hook.weights_map = {**{n: hook.weights_map[n] for n in hook.weights_map}, name: tensor}


def _put_in_memory(kept: MutableMapping[str, Tensor], key: str, tensor: Tensor) -> None:
    """Make ``tensor`` what ``kept`` holds for ``key``, and for the weights that are tied to it.

    ``cpu_offload`` of a model that is on an accelerator copies tied weights apart. Then nothing but their values tells
    that they were tied, and to change one of them is an error.
    """
    if type(kept) is not dict or key not in kept:  # a map of someone else's may read a requested tensor from a disk
        kept[key] = tensor
        return
    old = kept[key]
    names = [name for name, other in kept.items() if _is_same_memory(other, old)]
    for name, other in kept.items():
        if name not in names and _has_same_values(other, old):
            raise _tied(key, name, "memory of its own")
    kept.update(dict.fromkeys(names, tensor))


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if one is other or one.shape != other.shape:
        return one is other
    here, there = _values(one), _values(other)
    return here.data_ptr() == there.data_ptr() and here.numel() > 0


def _has_same_values(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if is_quantized_experts(one) and is_quantized_experts(other):
        here, there = one.packed.tensors(), other.packed.tensors()  # type: ignore[attr-defined]
        return here.keys() == there.keys() and all(have_same_bits(here[name], there[name]) for name in here)
    if is_quantized_experts(one) or is_quantized_experts(other):
        return False
    same_start = have_same_bits(_values(one)[:1], _values(other)[:1])  # which tells most apart in a moment
    return same_start and have_same_bits(one, other)


def _values(tensor: Any) -> Tensor:
    """Return the tensor in whose memory the values of ``tensor`` lie; quantized experts have none of their own."""
    found: Tensor = (tensor.packed.parts[0].codes if is_quantized_experts(tensor) else tensor).detach()
    return found if found.ndim else found[None]


def _names_of_tensor(loader: Any, key: str) -> list[str]:
    """Return all names that the index of ``loader`` leads to the tensor of ``key``: tied weights of a checkpoint."""
    entry = loader.index[key]
    if "safetensors_file" not in entry or "weight_name" not in entry:
        return [key]
    return [name for name, other in loader.index.items() if other == entry]


def _refuse_tied(loader: Any, key: str, known: list[str]) -> None:
    """Raise if ``key`` was tied to a weight that accelerate wrote to another file: only their equal values tell that."""
    import torch

    entry, start = loader.index[key], _first_bytes(loader, key)
    for name, other in loader.index.items():
        if name not in known and other == entry and start is not None and _first_bytes(loader, name) == start:
            if torch.equal(loader[name], loader[key]):
                raise _tied(key, name, "a file of its own on the disk")


def _first_bytes(loader: Any, key: str) -> bytes | None:
    """Read the beginning of the file that accelerate wrote for ``key``: it tells most weights apart in a moment."""
    try:
        with open(os.path.join(loader.save_folder or "", f"{key}.dat"), "rb") as file:
            return file.read(256)
    except OSError:  # it lies in a checkpoint, or was changed already
        return None


def _tied(key: str, other: str, place: str) -> ValueError:
    return ValueError(
        f"{key!r} is offloaded and cannot be changed: {other!r} has the same values in {place}. The two may be tied "
        "weights, and changing one would untie them. Merge into the whole model before it is offloaded, or "
        "offload with from_pretrained(device_map=...), which keeps weights tied."
    )


def _write_to_disk(loader: Any, key: str, tensor: Tensor) -> dict[str, Any]:
    """Write ``tensor`` to a new file, and return the entry of an index that leads there."""
    from safetensors.torch import save_file

    folder = getattr(loader, "_patches_folder", None)
    if folder is None:
        folder = loader._patches_folder = tempfile.mkdtemp(prefix="changed-", dir=loader.save_folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = os.path.join(folder, f"{next(_counter)}.safetensors")
    save_file({key: tensor.contiguous()}, file)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"safetensors_file": file, "weight_name": key, "dtype": dtype, "shape": list(tensor.shape)}
