"""What is alive in this process: the instances of a few classes.

They are found as what refers to their class. A list of all that the garbage collector tracks would hold tuples
that other threads are just building, and break them. One question asks for all of its classes at once: it costs
as much as one walk over everything, a tenth of a second. Several questions in a row share what was found inside
:func:`one_walk`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_COMMON = {"Embedding4bit", "Linear4bit", "Linear8bitLt", "Params4bit"}
"""Classes of ``bitsandbytes.nn`` that the walk looks for, whatever was asked first."""
_Found = dict[type, list[Any]]
_shared: list[_Found] | None = None
"""Inside ``one_walk``: what its walk found, once there was a question."""


def instances(kind: type[T]) -> list[T]:
    """Every object alive whose class is ``kind`` or below it."""
    found = _shared[0] if _shared and kind in _shared[0] else _walk({kind, *_common()})
    if _shared is not None:
        _shared[:] = [found]
    return [thing for cls in _family(kind) for thing in found.get(cls, ())]


def collect() -> None:
    """Run the garbage collector, and let the next question walk anew: what was only in a cycle is gone."""
    if _shared:
        _shared.clear()
    gc.collect()


@contextlib.contextmanager
def one_walk() -> Iterator[None]:
    """Inside, all questions are answered from one walk. What it found stays alive until the end."""
    global _shared
    before, _shared = _shared, []
    try:
        yield
    finally:
        _shared = before


def _common() -> Iterator[type]:
    module = sys.modules.get("bitsandbytes.nn")
    return (vars(module)[name] for name in _COMMON if name in vars(module)) if module else iter(())


def _family(kind: type) -> list[type]:
    """``kind`` and every class below it."""
    found = [kind]
    for cls in found:
        subclasses: list[type] = type.__subclasses__(cls)
        found += [below for below in subclasses if below not in found]
    return found


def _walk(kinds: set[type]) -> _Found:
    classes = {cls for kind in kinds for cls in _family(kind)}
    found: _Found = {cls: [] for cls in classes}
    for thing in gc.get_referrers(*classes):
        if type(thing) in found:  # not __class__: a proxy would do what it stands for
            found[type(thing)].append(thing)
    return found


def holders(thing: object, depth: int) -> list[Any]:
    """The modules of torch that refer to ``thing`` through at most ``depth`` dicts below their own ``__dict__``."""
    from torch.nn import Module

    found: list[Any] = []
    level: list[Any] = [thing]
    for _ in range(depth + 2):
        referrers = gc.get_referrers(*level) if level else []
        found += [holder for holder in referrers if isinstance(holder, Module)]
        level = [holder for holder in referrers if type(holder) is dict]
    return found
