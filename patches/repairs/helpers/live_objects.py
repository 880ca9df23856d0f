"""What is alive in this process: modules and tensors, found among all that the garbage collector tracks.

A walk over everything takes a tenth of a second. Several questions in a row share one inside :func:`one_walk`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

_Found = dict[type, list]
_shared: list[_Found] | None = None
"""Inside ``one_walk``: what its walk found, once there was a question."""


def instances(kind: type[T]) -> list[T]:
    """Every object alive whose class is ``kind`` or below it, a subclass of ``Module`` or ``Tensor`` of torch."""
    found = _shared[0] if _shared else _walk()
    if _shared is not None and not _shared:
        _shared.append(found)
    return [thing for cls, things in found.items() if issubclass(cls, kind) for thing in things]


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


def _walk() -> _Found:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found: _Found = {}
    skipped: set[type] = set()
    for thing in gc.get_objects():
        cls = type(thing)  # not __class__: a proxy would do what it stands for
        if cls in found:
            found[cls].append(thing)
        elif cls not in skipped:
            if issubclass(cls, (torch.nn.Module, torch.Tensor)):
                found[cls] = [thing]
            else:
                skipped.add(cls)
    return found
