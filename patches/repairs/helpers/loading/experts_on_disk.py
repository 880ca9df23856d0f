"""Quantized experts that wait on the disk: one file for each parameter, read for each use of its layer.

An index of accelerate leads to a tensor. These are several, so they are found where accelerate looks first: among what
it takes to be in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .places import Places

if TYPE_CHECKING:
    from ..experts.found import Found
    from .packed_files import Entry, Folder, Index

_LAYOUT = "experts"


class Waiting:
    """Stands for experts in the map of a hook; the class itself, which copies of the map share."""

    device = "disk"


def write(folder: Folder, name: str, weight: Any) -> Entry:
    """Write ``weight``, and say how :class:`Kept` finds it."""
    parts = {key: tensor.to("cpu") for key, tensor in weight.packed.tensors().items()}
    layout = weight.packed.layout(), weight.dtype, weight.swapped
    return {"safetensors_file": folder.write_parts(name, weight, parts), "weight_name": name, _LAYOUT: layout}


class Kept(dict[str, Any]):
    """What hooks bring from memory, and the experts that ``index`` leads to."""

    def __init__(self, tensors: dict[str, Any], index: Index) -> None:
        waiting = [name for name, entry in index.items() if _LAYOUT in entry]
        super().__init__({**tensors, **dict.fromkeys(waiting, Waiting)})
        self.index = index

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return _read(self.index[name]) if found is Waiting else found


def _read(entry: Entry) -> Any:
    from safetensors.torch import load_file

    from ..experts.packed import Packed
    from ..experts.tensor import as_parameter

    layout, dtype, swapped = entry[_LAYOUT]
    return as_parameter(Packed.laid_out(layout, load_file(entry["safetensors_file"])), dtype, swapped)


def refuse(found: Iterable[Found], load_config: Any) -> None:
    """Raise if some of them are to wait on the disk and cannot, before anything is read."""
    from transformers.integrations.accelerate import get_device

    device_map = load_config.device_map
    for one in found:
        if device_map and get_device(device_map, one.full_name) == "disk":
            if not isinstance(device_map, Places):
                raise NotImplementedError(
                    f"the device map sends {one.full_name} to the disk, which works for quantized experts only "
                    "with the patch transformers-refuses-what-does-not-fit. Apply it, or give that layer another device."
                )
            if load_config.disk_offload_folder is None:
                raise ValueError(
                    f"the device map sends the quantized experts {one.full_name} to the disk, where they are written "
                    "while the model is loaded. Name a folder for them: from_pretrained(..., offload_folder=...)."
                )
