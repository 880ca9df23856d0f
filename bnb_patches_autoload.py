"""What bitsandbytes calls at the end of its own import (entry point ``bitsandbytes.backends``).

It has a name of its own because ``patches`` is a common one: a ``patches.py`` in the user's working
directory comes first on ``sys.path``, and must neither break ``import bitsandbytes`` nor be imported
by it. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

_OURS = Path(__file__).resolve().parent / "patches" / "__init__.py"
_ALIAS = "bnb_patches"
"""The name our package gets where the user has a ``patches`` of their own."""


def start() -> None:
    """Apply the patches, now or after the import of what they repair. Never raises."""
    log = logging.getLogger("bnb_patches")
    try:
        importlib.import_module(f"{_package(log)}.autoload").start()
    except Exception as error:
        with contextlib.suppress(Exception):  # a handler of the user's may raise
            log.warning("bnb-patches is not active, bitsandbytes is as it was: %s: %s", type(error).__name__, error)
            log.debug("the import of bnb-patches failed", exc_info=True)


def _package(log: logging.Logger) -> str:
    """The name under which our package can be imported; loads it under another if that is taken."""
    if _ALIAS in sys.modules:
        return _ALIAS
    found = _where("patches")
    if found == str(_OURS):
        return "patches"
    log.warning(
        "%s hides the package 'patches' of bnb-patches, which is therefore loaded as '%s': "
        "use `import %s` after `import bitsandbytes`, or rename yours.", found, _ALIAS, _ALIAS,
    )  # fmt: skip
    _load(_ALIAS)
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


def _load(name: str) -> ModuleType:
    """Import our package from beside this file, as ``name``. All imports inside it are relative."""
    spec = importlib.util.spec_from_file_location(name, _OURS, submodule_search_locations=[str(_OURS.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
