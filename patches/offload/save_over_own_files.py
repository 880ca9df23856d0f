"""Saving a model into the folder that it reads its offloaded weights from, so that nothing is lost on the way.

Until all is written, the files that the model reads stay as they are: the files that take their names are written beside
them. Then the old files get names in a folder of their own, where the model reads on until it is gone, and the new
ones get theirs.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..engine import Rewrite
from . import weights_maps
from .weight_files import Folder, Index

_PART = ".part"
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


def _files_read(model: Any, directory: str) -> set[str]:
    """Return the names of the files in ``directory`` that ``model`` reads."""
    files = {
        entry.get("safetensors_file") for loader in weights_maps.find_loaders(model) for entry in loader.index.values()
    }
    there = os.path.realpath(directory)
    return {os.path.basename(file) for file in files if file and os.path.realpath(os.path.dirname(file)) == there}


def _files_kept(model: Any, directory: str) -> set[str]:
    """Return the names of the files that stay until all is written: the whole checkpoint, if ``model`` reads any of it."""
    return _files_read(model, directory) and {name for name in os.listdir(directory) if name.endswith(".safetensors")}


def removable_files(names: list[str], model: Any, directory: str) -> list[str]:
    """Return the files ``names`` in ``directory`` that may be removed before ``model`` is written."""
    kept = _files_kept(model, directory)
    return [name for name in names if name not in kept]


def save_config(model: Any, directory: str) -> None:
    """Save the configuration of ``model``, beside the old one until the weights that this belongs to are replaced.

    A model of diffusers saves its own, one of transformers has an object for it.
    """
    save: Callable[[str], None] = getattr(model, "save_config", None) or model.config.save_pretrained
    if not _files_read(model, directory):
        save(directory)
        return
    with tempfile.TemporaryDirectory(dir=directory) as new:
        save(new)
        for name in os.listdir(new):
            end = _PART if name == "config.json" else ""
            os.replace(os.path.join(new, name), os.path.join(directory, name + end))


def save_beside(save_file: Callable[..., None], model: Any) -> Callable[..., None]:
    """Return ``safetensors.torch.save_file``; it writes beside a file that has to stay, in its place otherwise."""

    def save(tensors: Any, file: str, **options: Any) -> None:
        directory, name = os.path.split(file)
        save_file(tensors, file + (_PART if name in _files_kept(model, directory) else ""), **options)

    return save


def rewrite_saving(target: str, save_own_config: str, save_file: str) -> tuple[Rewrite, ...]:
    """Return the edits of ``target``, a ``save_pretrained`` that calls ``save_own_config`` and the function ``save_file``."""
    return (
        Rewrite.to_call(target, save_own_config, save_config, "model_to_save, save_directory"),
        *(
            Rewrite.to_call(target, files, function, f"{files}, model_to_save, save_directory")
            for files, function in (
                ("os.listdir(save_directory)", removable_files),
                ("state_dict_split.filename_to_tensors.items()", ShardsInPlace),
            )
        ),
        Rewrite.to_call(target, save_file, save_beside, f"{save_file}, model_to_save"),
    )


class ShardsInPlace:
    """The items of a dict of file names; when all are written, and only then, the new files take the old ones' names."""

    def __init__(self, shards: Iterable[tuple[str, Any]], model: Any, directory: str) -> None:
        self.items, self.model, self.directory = list(shards), model, os.fspath(directory)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        parts = [self._at(f"{name}{_PART}") for name in ("config.json", *(name for name, _ in self.items))]
        try:
            yield from self.items
            new = {name for name, _ in self.items}
            kept = _files_kept(self.model, self.directory)
            old = {name for name in kept if name in new or self._is_left(name, new)}
            read = old & _files_read(self.model, self.directory)
            if read:
                self._keep(read)
            for part in filter(os.path.exists, parts):
                os.replace(part, part.removesuffix(_PART))
            for name in old - new:
                os.remove(self._at(name))
        finally:
            for part in parts:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(part)

    def _is_left(self, name: str, new: set[str]) -> bool:
        """Tell whether ``name`` is a shard of the checkpoint that is replaced: transformers removes these."""
        stem = re.split(r"-\d{5}-of-|\.safetensors", next(iter(new), ""))[0]
        return _SHARD.fullmatch(name) is not None and name.startswith(stem)

    def _keep(self, names: set[str]) -> None:
        """Give ``names`` a second name each, by which the model reads them from now on."""
        above = os.path.dirname(os.path.realpath(self.directory))
        try:
            folder = self._linked(names, above)
        except OSError:  # it may not be written to, or is another file system
            folder = self._linked(names, self.directory)
        moved = {name: os.path.join(folder.path, name) for name in names}
        there = os.path.realpath(self.directory)
        for loader in weights_maps.find_loaders(self.model):
            for key, entry in list(loader.index.items()):
                where, name = os.path.split(entry.get("safetensors_file") or "")
                if name in moved and os.path.realpath(where) == there:
                    loader.index[key] = {**entry, "safetensors_file": moved[name]}
            if isinstance(loader.index, Index):
                loader.index.know()
            loader._patches_kept = (*getattr(loader, "_patches_kept", ()), folder)

    def _linked(self, names: set[str], inside: str) -> Folder:
        folder = Folder(inside)
        for name in names:
            os.link(os.path.realpath(self._at(name)), os.path.join(folder.path, name))
        return folder

    def _at(self, name: str) -> str:
        return os.path.join(self.directory, name)
