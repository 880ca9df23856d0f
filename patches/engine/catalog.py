"""Finding the patches: every module under ``repairs/`` outside of ``repairs/reproducers`` has a ``PATCH``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from .patch import Patch


def patches() -> list[Patch]:
    """Return all patches, by id: the order in which they are applied."""
    package = __package__.rpartition(".")[0]  # by our own name: the shim may have had to give us another
    found = (importlib.import_module(name).PATCH for name in _modules(f"{package}.repairs"))
    return sorted(found, key=lambda patch: patch.id)


def _modules(package: str) -> Iterator[str]:
    """Give the modules in the folder of ``package`` and below it, without the reproducers' models."""
    importlib.import_module(package)
    for info in pkgutil.iter_modules(sys.modules[package].__path__, package + "."):
        if not info.ispkg:
            yield info.name
        elif not info.name.endswith(".reproducers"):
            yield from _modules(info.name)
