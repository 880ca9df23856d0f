"""The live instances of a few classes in this process.

They are found among the objects that refer to their class: a list of all objects that the garbage collector tracks would
hold tuples that other threads are still building, and break them. A walk over everything takes 0.06 to 0.08 s, and looks
for all classes that ``damage()`` asks for. Questions inside :func:`one_walk` share it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_ASKED = {
    "bitsandbytes.nn": ("Embedding4bit", "Linear4bit", "Linear8bitLt", "Params4bit"),
    "peft.tuners.unilora.layer": ("Linear",),
}
"""Classes that ``damage()`` asks for, by module."""
_Found = dict[type, list[Any]]


class _Shared(threading.local):
    """The objects that were found inside this thread's :func:`one_walk`: empty before a question, None outside of it."""

    found: _Found | None = None


_shared = _Shared()


def find_instances(kind: type[T]) -> list[T]:
    """Return every object alive whose class is ``kind`` or below it."""
    found = _shared.found
    if found is None or kind not in found:
        found = _walk({kind, *_asked()})
    if _shared.found is not None:
        _shared.found = found
    return [thing for cls in _family(kind) for thing in found.get(cls, ())]


def collect_garbage() -> None:
    """Run the garbage collector, and let the next question walk anew: what was only in a cycle is gone."""
    if _shared.found is not None:
        _shared.found = {}
    gc.collect()


def without_garbage(question: Callable[[], list[T]]) -> list[T]:
    """Return the instances that ``question`` finds; if there are any, without those that only a cycle holds."""
    if not question():
        return []
    collect_garbage()
    return question()


@contextlib.contextmanager
def one_walk() -> Iterator[None]:
    """Answer all questions inside, in this thread, from one walk. One inside another is the same.

    The found instances stay alive until the end.
    """
    if _shared.found is not None:
        yield
        return
    _shared.found = {}
    try:
        yield
    finally:
        _shared.found = None


def _asked() -> Iterator[type]:
    for name, classes in _ASKED.items():
        module = sys.modules.get(name)
        yield from (vars(module)[cls] for cls in classes if cls in vars(module)) if module else ()


def _family(kind: type) -> list[type]:
    """Return ``kind`` and every class below it."""
    found = [kind]
    for cls in found:
        subclasses: list[type] = type.__subclasses__(cls)
        found += [below for below in subclasses if below not in found]
    return found


def _walk(kinds: set[type]) -> _Found:
    found: _Found = {cls: [] for kind in kinds for cls in _family(kind)}
    for thing in gc.get_referrers(*found):
        if type(thing) in found:  # not __class__: a proxy would call the object behind it
            found[type(thing)].append(thing)
    return found


def find_holders(thing: object, depth: int) -> list[Any]:
    """Return the modules of torch that refer to ``thing`` through at most ``depth`` dicts below their ``__dict__``."""
    from torch.nn import Module

    found: list[Any] = []
    level: list[Any] = [thing]
    for _ in range(depth + 2):
        referrers = gc.get_referrers(*level) if level else []
        found += [holder for holder in referrers if isinstance(holder, Module)]
        level = [holder for holder in referrers if type(holder) is dict]
    return found
