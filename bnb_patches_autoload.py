"""What bitsandbytes and torch call at the end of their own imports.

bitsandbytes (entry point ``bitsandbytes.backends``) calls :func:`start`. torch (``torch.backends``) calls :func:`wait`,
for programs that quantize without bitsandbytes; every program that imports torch pays for that, so it imports one
small file and leaves the rest until a package arrives that has something to repair.

Both import our package as ``bnb_patches``: ``patches`` is a common name, and a program that has a ``patches`` of its
own, or puts one on ``sys.path`` later, keeps it. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

_ROOT = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "bnb_patches"
_WITHOUT_BITSANDBYTES = ("accelerate", "diffusers", "llamafactory", "peft", "torchao", "transformers", "trl")
"""Those that have something to repair where bitsandbytes is never imported."""
_NO = ("0", "false", "no", "off")


def wait() -> None:
    """Start when torch is imported and one of those packages too. Never raises."""
    if _is_off():
        return
    try:
        imports = _hooks()

        def begin() -> None:
            imports.stop()
            start()

        def watch() -> None:
            if any(map(imports.imported, _WITHOUT_BITSANDBYTES)):
                return begin()
            for name in _WITHOUT_BITSANDBYTES:
                imports.after_import(name, begin)

        imports.after_import("torch", watch)
    except Exception as error:
        _say(error)


def start() -> None:
    """Apply the patches, now or after the import of what they repair. Never raises."""
    try:
        if _is_off() and not _started():
            return  # `import patches` finds it
        _package()
        importlib.import_module(f"{_PACKAGE}.autoload").start()
    except Exception as error:
        _say(error)


def _is_off() -> bool:
    """Whether ``PATCHES_AUTOLOAD`` says so."""
    return os.environ.get("PATCHES_AUTOLOAD", "").strip().lower() in _NO


def _started() -> bool:
    """Whether an earlier import has started it: what still waits for a package then is to wait no more."""
    registry = getattr(sys.modules.get(f"{_PACKAGE}.process_registry"), "REGISTRY", None)
    return registry is not None and registry.on_change is not None


def _package() -> ModuleType:
    """Our package, from the folder or archive that this file lies in; else wherever it is found."""
    if _PACKAGE in sys.modules:
        return sys.modules[_PACKAGE]
    if PathFinder.find_spec(_PACKAGE, [_ROOT]) is None:
        return importlib.import_module(_PACKAGE)
    return _load(_PACKAGE, _PACKAGE, _ROOT)


def _hooks() -> ModuleType:
    """``patches/engine/imports.py`` alone, before the rest: it imports nothing of ours."""
    name = "bnb_patches_imports"
    return sys.modules.get(name) or _load(name, "imports", os.path.join(_ROOT, "patches", "engine"))


def _load(name: str, stem: str, folder: str) -> ModuleType:
    """Load the module or package ``stem`` in ``folder`` as ``name``: source, bytecode or archive."""
    spec = PathFinder.find_spec(stem, [folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {stem} in {folder}")
    loader: Any = spec.loader
    module = importlib.util.module_from_spec(spec)
    module.__name__ = name
    sys.modules[name] = module
    try:
        exec(loader.get_code(stem), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _say(error: Exception) -> None:
    log = logging.getLogger("bnb_patches")
    with contextlib.suppress(Exception):  # a handler of the user's may raise
        log.warning("bnb-patches is not active, nothing was changed: %s: %s", type(error).__name__, error)
        log.debug("the import of bnb-patches failed", exc_info=True)
