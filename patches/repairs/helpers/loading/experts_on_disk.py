"""Quantized experts that wait on the disk: one file for each parameter, read for each use of its layer.

An index of accelerate leads to a tensor. These are several, so they are found where accelerate looks first: among what
it takes to be in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .packed_files import Entry, Folder, Index

_LAYOUT = "experts"


class Waiting:
    """Stands for experts in the map of a hook; the class itself, which copies of the map share."""

    device = "disk"


def write(folder: Folder, name: str, weight: Any) -> Entry:
    """Write ``weight``, and say how :class:`Kept` finds it."""
    parts = {key: tensor.to("cpu") for key, tensor in weight.packed.tensors().items()}
    layout = weight.packed.layout(), weight.dtype
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

    layout, dtype = entry[_LAYOUT]
    return as_parameter(Packed.laid_out(layout, load_file(entry["safetensors_file"])), dtype)
