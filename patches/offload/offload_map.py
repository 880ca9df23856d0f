"""A device map of which each module is named once, none inside another, and what loading notes beside it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from . import prefetch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .weight_files import Entry, Folder

Place = Any
"""A number, a string or a ``torch.device``; "cpu" and "disk" are where weights wait that are brought for each use."""

OFFLOADED = ("cpu", "disk")


class OffloadMap(dict[str, Place]):
    """A device map whose modules are disjoint and are all there is."""

    def __init__(self, places: Mapping[str, Place], given: Mapping[str, Place]) -> None:
        super().__init__(places)
        self.given = dict(given)
        self.main = execution_device(given)
        """Where offloaded modules are quantized, and where they compute, if not in a layer of ``divided``."""
        self.divided: dict[str, Place] = {}
        """Layers that have a part on one device, of several, and where all of them computes."""
        self.folder: Folder | None = None
        """What was written to the disk while loading."""
        self.handled: BaseException | None = None
        """The error that a program was dealing with when it began to load, such as the error of loading whole."""
        self.scales: dict[str, Tensor] = {}
        """Row scales of INT8 weights on the disk, by the names of a state dict."""
        self.index: dict[str, Entry] = {}
        """What lies on the disk, where transformers 4 loads."""
        self.ahead = prefetch.prefetch_window()
        """How many bytes of the disk are asked for before they are used."""
        self.root = ""
        """What names in it have before them in the whole model."""

    def at(self, name: str) -> Place:
        """Where the module or tensor ``name`` waits; None if nothing says so."""
        found = find_enclosing(self, name)
        return None if found is None else self[found]

    def computes_at(self, name: str) -> Place:
        """Where the module or tensor ``name``, which is offloaded, is quantized and computes."""
        layer = find_enclosing(self.divided, name)
        return self.main if layer is None else self.divided[layer]


def find_enclosing(names: Container[str], name: str) -> str | None:
    """The longest of ``names`` that is ``name`` or a module that has it; "" has all."""
    while name not in names:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def execution_device(device_map: Mapping[str, Place]) -> Place:
    """Where what ``device_map`` offloads computes: its first accelerator, or the CPU."""
    import torch

    resident = [place for place in device_map.values() if not is_offloaded_place(place)]
    accelerators = [place for place in resident if torch.device(place).type != "cpu"]
    return to_plain_place(next(iter([*accelerators, *resident]), "cpu"))


def to_plain_place(place: Place) -> Place:
    """``place`` as a number or a string: safetensors knows no ``torch.device``."""
    import torch

    return str(place) if isinstance(place, torch.device) else place


def is_offloaded_place(place: Place) -> bool:
    """Whether modules at ``place`` are brought for each use."""
    return isinstance(place, str) and place in OFFLOADED


def offloads_module(places: OffloadMap, module: str) -> bool:
    """Whether ``places`` brings ``module`` for each use."""
    return is_offloaded_place(places.at(module))


def to_torch_device(place: Place) -> torch.device:
    """``place`` as torch knows it."""
    import torch

    return torch.device("cpu" if place == "disk" else place)
