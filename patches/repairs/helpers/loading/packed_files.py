"""Packed weights on the disk, written while a model is loaded, and how long they stay there.

Each load has a folder of its own inside ``offload_folder``, so that two models never share a file. It is removed with
the last object that can read it: the index that accelerate's hooks hold.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .experts import readable

if TYPE_CHECKING:
    from torch import Tensor

Entry = dict[str, Any]
"""What an index of accelerate says of a tensor: a safetensors file, a name in it, a dtype."""


class Folder:
    """A folder that exists as long as this object."""

    def __init__(self, inside: str) -> None:
        self.inside = inside
        try:
            os.makedirs(inside, exist_ok=True)
            self.path = tempfile.mkdtemp(prefix="quantized-", dir=inside)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"offload_folder={inside!r} cannot be written to ({error.strerror}). Give from_pretrained an "
                "offload_folder on a disk that can hold the layers of the device_map that are on the disk",
                inside,
            ) from error
        self.remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def __copy__(self) -> Folder:
        return self

    def __deepcopy__(self, memo: Any) -> Folder:
        return self  # a copy of a model reads the same files

    def write(self, name: str, tensor: Tensor) -> Entry:
        """Write ``tensor``, and say how accelerate finds it."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = os.path.join(self.path, f"{name}.safetensors")
        try:
            save_file({name: tensor.contiguous()}, f"{file}.part")
            os.replace(f"{file}.part", file)  # so that what has the name is whole
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"The {readable(tensor.nbytes)} of {name!r} could not be written to offload_folder={self.inside!r}, "
                f"which has {readable(_free(self.inside))} free: {error}. Nothing of this model is left there. Make "
                "room, give another offload_folder, or keep more layers on a device or the CPU."
            ) from error
        return {"safetensors_file": file, "weight_name": name, "dtype": str(tensor.dtype).removeprefix("torch.")}


class Index(dict[str, Entry]):
    """An index of accelerate that keeps the folder that it leads to."""

    def __init__(self, entries: Mapping[str, Entry], folder: Folder | None) -> None:
        super().__init__(entries)
        self.folder = folder


def _remove(path: str, made_by: int) -> None:
    if os.getpid() == made_by:  # a forked process ends with copies of the objects of its parent
        shutil.rmtree(path, ignore_errors=True)


def _free(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
