"""Weights on the disk: written while a model is loaded, and read for as long as it is used.

Each load has a folder of its own inside ``offload_folder``, so that two models never share a file. It is removed with
the last object that can read it: the index that accelerate's hooks hold. Before each read the index looks whether the
file is the one that it was: a checkpoint that somebody has written anew would give other numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..process.byte_sizes import format_bytes
from . import prefetch, stale_offload_folders

if TYPE_CHECKING:
    from torch import Tensor

Entry = dict[str, Any]  # of an index of accelerate: a safetensors file, the name of a tensor in it, a dtype


class Folder:
    """A folder that exists as long as this object."""

    def __init__(self, inside: str) -> None:
        self.inside = inside
        try:
            os.makedirs(inside, exist_ok=True)
            stale_offload_folders.remove_stale_folders(inside)
            self.path = tempfile.mkdtemp(prefix=stale_offload_folders.FOLDER_PREFIX, dir=inside)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"offload_folder={inside!r} cannot be written to ({error.strerror}). Give from_pretrained an "
                "offload_folder that can be written to and has room for the layers that the device_map sends to the disk",
                inside,
            ) from error
        self.remove = weakref.finalize(
            self, _remove, self.path, os.getpid(), stale_offload_folders.lock_folder(self.path)
        )

    def __copy__(self) -> Folder:
        return self

    def __deepcopy__(self, memo: Any) -> Folder:
        return self  # a copy of a model reads the same files

    def write(self, name: str, tensor: Tensor) -> Entry:
        """Write ``tensor``, and return the entry by which accelerate finds it."""
        file = self.write_parts(name, tensor, {name: tensor})
        return {"safetensors_file": file, "weight_name": name, "dtype": str(tensor.dtype).removeprefix("torch.")}

    def write_parts(self, name: str, whole: Tensor, parts: Mapping[str, Tensor], file: str | None = None) -> str:
        """Write the ``parts`` of the parameter ``name`` to ``file``, or to a file of its own, and return the path."""
        from safetensors.torch import save_file

        file = os.path.join(self.path, f"{file or name}.safetensors")
        with self.writing(name, whole):
            save_file({key: tensor.contiguous() for key, tensor in parts.items()}, f"{file}.part")
            os.replace(f"{file}.part", file)  # so that what has the name is whole
        return file

    @contextlib.contextmanager
    def writing(self, name: str, tensor: Tensor) -> Iterator[None]:
        """Have an error of writing ``tensor`` meanwhile name it and the folder."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            if not os.path.isdir(self.path):
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"{name!r} could not be written to {self.path}, because that folder was deleted while the model was "
                    "loaded. Load the model again, and do not change or remove the folder while the model is in use.",
                ) from error
            raise OSError(
                f"The {format_bytes(tensor.nbytes)} of {name!r} could not be written to offload_folder={self.inside!r}, "
                f"which has {format_bytes(_free(self.inside))} free: {error}. What was written of this model is "
                "removed. Make room, give another offload_folder, or keep more layers on a device or the CPU."
            ) from error


class Index(dict[str, Entry]):
    """An index of accelerate that keeps the folder that it leads to, and knows its files again."""

    def __init__(self, entries: Mapping[str, Entry], folder: Folder | None, window: int) -> None:
        super().__init__(entries)
        self.folder = folder
        self._known: dict[str, tuple[int, int]] = {}
        self._prefetcher = prefetch.Prefetcher(window)
        self.know()

    def know(self) -> None:
        """Know the files again that the entries lead to now."""
        for file in {entry["safetensors_file"] for entry in self.values() if "safetensors_file" in entry}:
            with contextlib.suppress(OSError):  # gone already: the first read says so
                self._known.setdefault(file, _stamp(file, self._is_ours(file)))

    def __getitem__(self, name: str) -> Entry:
        entry = super().__getitem__(name)
        file = entry.get("safetensors_file")
        if file is not None:
            self._check(name, file)
            self._prefetcher.ask_after(name, self)
        return entry

    def _is_ours(self, file: str) -> bool:
        return self.folder is not None and os.path.dirname(file) == self.folder.path

    def _check(self, name: str, file: str) -> None:
        ours = self._is_ours(file)
        whose = (
            "which was written when the model was loaded" if ours else "the checkpoint that the model was loaded from"
        )
        do = "Load the model again, and do not change or remove the file while the model is in use"
        try:
            now = _stamp(file, ours)
        except OSError as error:
            text = f"{name!r} is on the disk in {file}, {whose}, and cannot be read: {error.strerror}. {do}."
            raise type(error)(error.errno, text) from error
        known = self._known.get(file, now)
        if now[0] < known[0]:
            raise RuntimeError(
                f"{name!r} is on the disk in {file}, {whose}, and the file was truncated from {known[0]} to {now[0]} "
                f"bytes. {do}."
            )
        if now != known:
            raise RuntimeError(
                f"{name!r} is on the disk in {file}, {whose}, and the file was rewritten since, perhaps with other "
                f"values. {do}. Save models to another folder."
            )


def _stamp(file: str, ours: bool) -> tuple[int, int]:
    """Return size and time of change; some network file systems set the time of a new file of ours once more."""
    found = os.stat(file)
    return found.st_size, 0 if ours else found.st_mtime_ns


def _remove(path: str, made_by: int, lock: int | None) -> None:
    if os.getpid() == made_by:  # a forked process ends with copies of the objects of its parent
        shutil.rmtree(path, ignore_errors=True)
        stale_offload_folders.unlock_folder(path, lock)


def _free(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
