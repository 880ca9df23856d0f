"""Finding the patches: every module of every package folder here that has a ``PATCH``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from .patch import Patch


def patches() -> Iterator[Patch]:
    """All patches, by folder and file name. Modules whose name begins with ``_`` are helpers."""
    import patches as package

    for folder in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if not folder.ispkg:
            continue
        parent = importlib.import_module(f"{package.__name__}.{folder.name}")
        for info in sorted(pkgutil.iter_modules(parent.__path__), key=lambda info: info.name):
            if not info.name.startswith("_"):
                yield importlib.import_module(f"{parent.__name__}.{info.name}").PATCH
