"""What bitsandbytes and torch call at the end of their own imports.

bitsandbytes (entry point ``bitsandbytes.backends``) calls :func:`start`. torch (``torch.backends``) calls :func:`wait`,
for programs that quantize without bitsandbytes; every program that imports torch pays for that, so it imports one
small file and leaves the rest until a package arrives that has something to repair.

It has a name of its own because ``patches`` is a common one: a ``patches.py`` in the user's working
directory comes first on ``sys.path``, and must neither break ``import bitsandbytes`` nor be imported
by it. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

_OURS = Path(__file__).resolve().parent / "patches" / "__init__.py"
_ALIAS = "bnb_patches"
"""The name our package gets where the user has a ``patches`` of their own."""
_WITHOUT_BITSANDBYTES = ("accelerate", "llamafactory", "peft", "torchao", "transformers", "trl")
"""Those that have something to repair where bitsandbytes is never imported."""
_NO = ("0", "false", "no", "off")


def wait() -> None:
    """Start when torch is imported and one of those packages too. Never raises."""
    if _is_off():
        return
    with contextlib.suppress(Exception):  # `start` will say what is wrong with this installation
        imports = _load("bnb_patches_imports", _OURS.parent / "engine" / "imports.py")

        def begin() -> None:
            imports.stop()
            start()

        def watch() -> None:
            if any(map(imports.imported, _WITHOUT_BITSANDBYTES)):
                return begin()
            for name in _WITHOUT_BITSANDBYTES:
                imports.after_import(name, begin)

        imports.after_import("torch", watch)


def start() -> None:
    """Apply the patches, now or after the import of what they repair. Never raises."""
    log = logging.getLogger("bnb_patches")
    try:
        if _is_off() and not _started() and _where("patches") == str(_OURS):
            return  # nothing to do, and `import patches` finds it
        importlib.import_module(f"{_package(log)}.autoload").start()
    except Exception as error:
        with contextlib.suppress(Exception):  # a handler of the user's may raise
            log.warning("bnb-patches is not active, nothing was changed: %s: %s", type(error).__name__, error)
            log.debug("the import of bnb-patches failed", exc_info=True)


def _is_off() -> bool:
    """Whether ``PATCHES_AUTOLOAD`` says so."""
    return os.environ.get("PATCHES_AUTOLOAD", "").strip().lower() in _NO


def _started() -> bool:
    """Whether an earlier import has started it: what still waits for a package then is to wait no more."""
    return any(f"{name}.autoload" in sys.modules for name in ("patches", _ALIAS))


def _package(log: logging.Logger) -> str:
    """The name under which our package can be imported; loads it under another if that is taken."""
    if _ALIAS in sys.modules:
        return _ALIAS
    found = _where("patches")
    if found == str(_OURS):
        return "patches"
    log.warning(
        "%s hides the package 'patches' of bnb-patches, which is therefore loaded as '%s': "
        "use `import %s` from then on, or rename yours.", found, _ALIAS, _ALIAS,
    )  # fmt: skip
    _load(_ALIAS, _OURS, package=True)
    return _ALIAS


def _where(name: str) -> str:
    """The file that ``import name`` gives or would give, without running it."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) if module else importlib.util.find_spec(name)
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if file:
        return str(Path(file).resolve())
    folders = getattr(spec, "submodule_search_locations", None)  # a folder without an __init__.py
    return str(list(folders)[0]) if folders else f"nothing on sys.path named {name!r}"


def _load(name: str, file: Path, package: bool = False) -> ModuleType:
    """Run ``file``, which lies beside this one, as the module ``name``. All imports inside our package are relative."""
    folders = [str(file.parent)] if package else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
