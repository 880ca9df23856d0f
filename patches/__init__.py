"""``import patches``: a second name for :mod:`bnb_patches`, where no other package is called ``patches``.

It gives the very modules of ``bnb_patches``: one registry, one class of each name. If another regular package or module
of this name is on ``sys.path``, wherever, that one is imported instead: ours is then ``bnb_patches``. From a folder
``patches`` without an ``__init__.py`` the modules that we do not have can be imported beside ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403
    from .api import __all__ as __all__
    from .process_registry import REGISTRY as REGISTRY

__bnb_patches__ = True
"""Tells this file from another of the same name."""

_NAME = "bnb_patches"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _ours() -> ModuleType:
    """Return the package under its own name."""
    if _NAME not in sys.modules:
        spec = PathFinder.find_spec(_NAME, [_ROOT])
        if spec is None or spec.loader is None:
            raise ImportError(
                f"the installation of bnb-patches is incomplete: {_NAME} is missing in {_ROOT}. "
                "Run `pip install --force-reinstall bnb-patches`"
            )
        sys.modules[_NAME] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_NAME]
            raise
    return sys.modules[_NAME]


def _others() -> list[str]:
    """Return the folders of ``sys.path`` in which a ``patches`` that is not ours may lie."""
    folders = [folder for folder in sys.path if isinstance(folder, str)]
    return [folder for folder in folders if not _is_ours(os.path.abspath(folder))]


def _is_ours(folder: str) -> bool:
    """Tell whether ``folder`` is the one that we lie in, or holds another copy of this project (a checkout, say)."""
    shim = os.path.join(folder, "bnb_patches_autoload.py")
    return folder == _ROOT or os.path.exists(shim) or os.path.exists(f"{shim}c")


def _elsewhere() -> ModuleSpec | None:
    """Find a regular package or module ``patches`` that is not ours."""
    spec = PathFinder.find_spec("patches", _others())
    return spec if spec is not None and spec.loader is not None and spec.origin is not None else None


class _SecondName:
    """Finds ``patches.x`` where ``bnb_patches.x`` is, while ``patches`` is ours."""

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("patches.") or sys.modules.get("patches") is not self._package:
            return None
        if name == "patches.__main__":  # is run, not imported
            return None
        found = PathFinder.find_spec(name, path)
        if found is not None:
            package = found.submodule_search_locations is not None
            loader: Any = _Again(f"{_NAME}{name.removeprefix('patches')}")
            return ModuleSpec(name, loader, is_package=package)
        beside = [os.path.join(folder, *name.split(".")[:-1]) for folder in _others()]
        return PathFinder.find_spec(name, beside)


class _Again:
    """Gives the module that is loaded, or to be loaded, as ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put the spec of the second name there


def _give() -> ModuleType:
    """Return the module for ``import patches``."""
    other = _elsewhere()
    if other is None:
        package = _ours()
        finder: Any = _SecondName(package)
        sys.meta_path.insert(0, finder)
        return package
    assert other.loader is not None
    sys.modules["patches"] = module = importlib.util.module_from_spec(other)
    other.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    sys.modules[__name__] = _give()
