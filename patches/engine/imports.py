"""Call back when a module has been imported *whole*: not yet, already, or half way through.

bitsandbytes calls its entry points while it is still importing itself, often from inside the import
of peft. A module counts as imported when its own import and its top-level package's are over.

The finder here does what wrapt's does, but for one thing: Python calls a finder under the global import
lock, and wrapt's then imports the parent of a submodule. If another thread is just importing that parent, both
wait for ever (two threads that first import bitsandbytes and bitsandbytes.nn.modules, with hooks on its submodules;
``tests/programs/wrapt_imports.py``). This one asks the other finders with the path that it was given, waits for no
thread, and holds no lock of its own: a callback may run in a signal handler, in any thread, or in a forked child.

The shim runs this file alone, before the rest of the package, and so as a second module: it imports nothing of
ours, and what one has put on a spec the other knows.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[], None]

_awaited: dict[str, list[Callback]] = {}
"""Modules that are not imported yet, and who is to be told."""


def imported(name: str) -> bool:
    """Tell whether the import of module ``name`` and of its package are over."""
    return name in sys.modules and _unfinished(name) is None


def after_import(name: str, callback: Callback) -> None:
    """Call ``callback`` once module ``name`` is imported; at once if it is. Imports nothing.

    It runs in the importing thread, which holds import locks: it must not wait for another thread.
    """
    _awaited.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if name in sys.modules:
        _arrived(name)


def after_outermost(callback: Callback) -> None:
    """Call ``callback`` when the import that this thread is in is over, and those around it; at once if it is in none."""
    spec = _outermost()
    if spec is not None:
        _after_load(spec, callback)
        if _is_watched(spec):
            return
    callback()


def _outermost() -> ModuleSpec | None:
    """Return the spec of the first load that this thread has begun and not ended."""
    found: ModuleSpec | None = None
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code.co_name == "_load_unlocked" and frame.f_globals.get("__name__") == "importlib._bootstrap":
            spec = frame.f_locals.get("spec")
            found = spec if getattr(spec, "_initializing", False) else found
    return found


def stop() -> None:
    """Wait for nothing any more."""
    _awaited.clear()
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        with contextlib.suppress(ValueError):  # someone else was faster
            sys.meta_path.remove(finder)


def _arrived(name: str) -> None:
    """Tell that ``name`` is imported, once the import of its package is over as well."""
    if name not in sys.modules:
        return  # it failed; it may be tried again
    spec = _unfinished(name)
    if spec is not None:
        _after_load(spec, partial(_arrived, name))
        return
    for callback in _awaited.pop(name, ()):
        callback()


def _unfinished(name: str) -> ModuleSpec | None:
    """Return the spec that is still being loaded, of the module or of its top-level package."""
    top = name.partition(".")[0]
    for part in (name, top) if top != name else (name,):
        spec: ModuleSpec | None = getattr(sys.modules.get(part), "__spec__", None)
        if spec is not None and getattr(spec, "_initializing", False):
            return spec
    return None


class _Finder:
    """Finds what the other finders find, and watches the loads of awaited modules."""

    def __init__(self) -> None:
        self._searching: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        search = (threading.get_ident(), name)
        if name not in _awaited or search in self._searching:
            return None
        self._searching.add(search)  # one of the others may ask all finders, and so come back here
        try:
            spec = self._found(name, path, target)
        finally:
            self._searching.discard(search)
        if spec is not None:
            _after_load(spec, partial(_arrived, name), begun=False)
        return spec

    def _found(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class _Watched:
    """What a spec becomes that is to tell when importlib takes down its ``_initializing`` flag, the end of a load.

    There is no public event for "this import is over".
    """

    _patches_watched = True

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            _loaded(self)


_WAITING = "_patches_waiting"


@functools.cache
def _watched(cls: type) -> type:
    return type(cls.__name__, (_Watched, cls), {})


def _after_load(spec: ModuleSpec, callback: Callback, begun: bool = True) -> None:
    vars(spec).setdefault(_WAITING, []).append(callback)
    if not _is_watched(spec):
        kind: Any = type(spec)
        try:
            spec.__class__ = _watched(kind)
        except TypeError:  # a spec of a kind that cannot be watched
            vars(spec).pop(_WAITING)
            return
    if begun and not vars(spec).get("_initializing"):
        _loaded(spec)  # it ended meanwhile in another thread


def _is_watched(spec: object) -> bool:
    return hasattr(type(spec), "_patches_watched")


def _loaded(spec: object) -> None:
    if _is_watched(spec):
        spec.__class__ = type(spec).__mro__[2]
    for callback in vars(spec).pop(_WAITING, ()):
        callback()
