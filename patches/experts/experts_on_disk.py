"""Quantized experts that wait on the disk: one file for each parameter, read for each use of its layer.

An index of accelerate leads to a tensor. These are several, so they are found where accelerate looks first: among what
it takes to be in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..offload.offload_map import OffloadMap
from ..quantized.quantized_experts import is_quantized_experts

if TYPE_CHECKING:
    from ..offload.weight_files import Entry, Folder, Index
    from .experts_in_model import ExpertParameter

_LAYOUT = "experts"
_CHANGES = itertools.count()


class ExpertsOnDisk:
    """Stands for experts in the map of a hook; the class itself, which copies of the map share."""

    device = "disk"


def write_experts(folder: Folder, name: str, weight: Any, file: str | None = None) -> Entry:
    """Write ``weight``, and return the entry by which :class:`ExpertsMap` finds it; ``file``: its name, if not the parameter's."""
    parts = {key: tensor.to("cpu") for key, tensor in weight.packed.tensors().items()}
    layout = weight.packed.layout(), weight.dtype, weight.swapped
    return {"safetensors_file": folder.write_parts(name, weight, parts, file), "weight_name": name, _LAYOUT: layout}


class ExpertsMap(dict[str, Any]):
    """The tensors that hooks bring from memory, and the experts that ``index`` leads to."""

    def __init__(self, tensors: dict[str, Any], index: Index) -> None:
        waiting = [name for name, entry in index.items() if _LAYOUT in entry]
        super().__init__({**tensors, **dict.fromkeys(waiting, ExpertsOnDisk)})
        self.index = index

    def __getitem__(self, name: str) -> Any:
        if not self.waits(name):
            return super().__getitem__(name)
        from safetensors.torch import load_file

        entry = self.index[name]
        return _parameter(entry, load_file(entry["safetensors_file"]))

    def __setitem__(self, name: str, value: Any) -> None:
        """Write merged experts to the disk again, to a file of their own: a copy of this map reads the one before."""
        if not self.waits(name) or not is_quantized_experts(value):
            return super().__setitem__(name, value)
        self.index[name] = write_experts(self.index.folder, name, value, f"{name}.{next(_CHANGES)}")  # type: ignore[arg-type]
        self.index.know()

    def waits(self, name: str) -> bool:
        """Tell whether the experts ``name`` are on the disk."""
        return super().get(name) is ExpertsOnDisk

    def read_expert(self, name: str, number: int) -> Any:
        """Read expert ``number`` of the parameter ``name`` alone; None if they do not wait on the disk."""
        from safetensors import safe_open

        from .packed_experts import TABLES

        if not self.waits(name):
            return None
        entry = self.index[name]
        with safe_open(entry["safetensors_file"], framework="pt") as file:
            tensors = {
                part: file.get_tensor(part) if part in TABLES else file.get_slice(part)[number : number + 1]
                for part in file.keys()  # noqa: SIM118
            }
        return _parameter(entry, tensors)


def _parameter(entry: Entry, tensors: dict[str, Any]) -> Any:
    """Make the parameter of the packed ``tensors`` of a file, or of one expert in it."""
    from .packed_experts import PackedExperts
    from .tensor import as_parameter

    layout, dtype, swapped = entry[_LAYOUT]
    return as_parameter(PackedExperts.from_layout(layout, tensors), dtype, swapped)


def refuse_if_not_offloadable(found: Iterable[ExpertParameter], load_config: Any) -> None:
    """Raise an error if some experts are to wait on the disk and cannot, before anything is read."""
    from transformers.integrations.accelerate import get_device

    device_map = load_config.device_map
    for one in found:
        if device_map and get_device(device_map, one.full_name) == "disk":
            if not isinstance(device_map, OffloadMap):
                raise NotImplementedError(
                    f"the device map sends {one.full_name} to the disk, which works for quantized experts only "
                    "with the patch transformers-device-map-refused. Apply it, or give that layer another device."
                )
            if load_config.disk_offload_folder is None:
                raise ValueError(
                    f"the device map sends the quantized experts {one.full_name} to the disk, where they are written "
                    "while the model is loaded. Name a folder for them: from_pretrained(..., offload_folder=...)."
                )
