"""Finding the patches: every module of every package folder here that has a ``PATCH``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from .patch import Patch


def patches() -> Iterator[Patch]:
    """All patches, by folder and file name. Modules whose name begins with ``_`` are helpers."""
    for folder in _modules(__package__, folders=True):  # by our own name: the shim may have had to give us another
        importlib.import_module(folder)
        for name in _modules(folder):
            yield importlib.import_module(name).PATCH


def _modules(package: str, folders: bool = False) -> list[str]:
    found = pkgutil.iter_modules(sys.modules[package].__path__)
    names = sorted(info.name for info in found if info.ispkg is folders and not info.name.startswith("_"))
    return [f"{package}.{name}" for name in names]
