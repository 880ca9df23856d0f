"""Call back when a module has been imported *whole*: not yet, already, or half way through.

bitsandbytes calls its entry points while it is still importing itself, often from inside the import
of peft. A module counts as imported when its own import and that of its top-level package are over.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import wrapt

Callback = Callable[[], None]


def imported(name: str) -> bool:
    """Whether the import of module ``name`` and of its package are over."""
    return name in sys.modules and _unfinished(name) is None


def after_import(name: str, callback: Callback) -> None:
    """Call ``callback`` once module ``name`` is imported; at once if it is. Imports nothing.

    It runs in the importing thread, which holds import locks: it must not wait for another thread.
    """

    def finish(_module: Any = None) -> None:
        spec = _unfinished(name)
        if spec is None:
            callback()
        else:
            _after_load(spec, finish)

    if name in sys.modules:
        finish()
    else:
        wrapt.register_post_import_hook(finish, name)


def _unfinished(name: str) -> ModuleSpec | None:
    """The spec that is still being loaded: that of the module or of its top-level package."""
    for part in (name, name.partition(".")[0]):
        spec = getattr(sys.modules.get(part), "__spec__", None)
        if spec is not None and getattr(spec, "_initializing", False):
            return spec
    return None


class _WatchedSpec(ModuleSpec):
    """A spec that tells when importlib takes down its ``_initializing`` flag, as the last step of a load.

    There is no public event for "this import is over": a finder only sees imports that begin later.
    """

    @property
    def _initializing(self) -> bool:
        return self.__dict__.get("_initializing", False)

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            _loaded(self)


_lock = threading.Lock()
_waiting: dict[int, list[Callback]] = {}


def _after_load(spec: ModuleSpec, callback: Callback) -> None:
    with _lock:
        _waiting.setdefault(id(spec), []).append(callback)
        if type(spec) is ModuleSpec:
            spec.__class__ = _WatchedSpec
    if not getattr(spec, "_initializing", False) or not isinstance(spec, _WatchedSpec):
        _loaded(spec)  # it ended meanwhile in another thread, or the spec is of a kind we cannot watch


def _loaded(spec: ModuleSpec) -> None:
    with _lock:
        callbacks = _waiting.pop(id(spec), [])
        if type(spec) is _WatchedSpec:
            spec.__class__ = ModuleSpec
    for callback in callbacks:
        callback()
