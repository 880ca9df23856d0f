"""A device map that names each module once, none inside another, and the state of the load that it is for."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from . import prefetch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .weight_files import Entry, Folder

Place = Any  # a number, a string or a ``torch.device``
OFFLOADED = ("cpu", "disk")  # weights at these places are brought for each use


class OffloadMap(dict[str, Place]):
    """A device map whose modules are disjoint and are all there is."""

    def __init__(self, places: Mapping[str, Place], given: Mapping[str, Place]) -> None:
        super().__init__(places)
        self.given = dict(given)
        # Where offloaded modules are quantized and compute, but for the parts of split layers.
        self.main = execution_device(given)
        self.devices_of_split_layers: dict[str, Place] = {}
        self.folder: Folder | None = None  # for the tensors that are written to the disk while loading
        # The error that a program was dealing with when it began to load, such as the error of loading whole.
        self.handled_error: BaseException | None = None
        self.scales: dict[str, Tensor] = {}  # row scales of INT8 weights on the disk, by the names of a state dict
        self.index: dict[str, Entry] = {}  # of the tensors on the disk, if transformers 4 or diffusers loads
        self.stored: dict[str, Entry] = {}  # of the tensors that the checkpoint has in safetensors, if diffusers loads
        self.prefetch_window = prefetch.prefetch_window()
        self.root = ""  # the prefix that names in this map have in the whole model

    def at(self, name: str) -> Place:
        """Return where the module or tensor ``name`` waits; None if the map has no place for it."""
        found = find_enclosing(self, name)
        return None if found is None else self[found]

    def computes_at(self, name: str) -> Place:
        """Return where the offloaded module or tensor ``name`` is quantized and computes."""
        layer = find_enclosing(self.devices_of_split_layers, name)
        return self.main if layer is None else self.devices_of_split_layers[layer]


def find_enclosing(names: Container[str], name: str) -> str | None:
    """Return the longest of ``names`` that is ``name`` or a module that has it; "" has all."""
    while name not in names:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def execution_device(device_map: Mapping[str, Place]) -> Place:
    """Return where the modules compute that ``device_map`` offloads: its first accelerator, or the CPU."""
    import torch

    resident = [place for place in device_map.values() if not is_offloaded_place(place)]
    accelerators = [place for place in resident if torch.device(place).type != "cpu"]
    return to_plain_place(next(iter([*accelerators, *resident]), "cpu"))


def to_plain_place(place: Place) -> Place:
    """Return ``place`` as a number or a string: safetensors knows no ``torch.device``."""
    import torch

    return str(place) if isinstance(place, torch.device) else place


def is_offloaded_place(place: Place) -> bool:
    """Tell whether modules at ``place`` are brought for each use."""
    return isinstance(place, str) and place in OFFLOADED


def offloads_module(places: OffloadMap, module: str) -> bool:
    """Tell whether ``places`` brings ``module`` for each use."""
    return is_offloaded_place(places.at(module))


def to_torch_device(place: Place) -> torch.device:
    """Return ``place`` as a ``torch.device``."""
    import torch

    return torch.device("cpu" if place == "disk" else place)
