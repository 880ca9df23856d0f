"""Whether code that was taken out may still run: in a frame that was entered before, or in a function made there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any

_SUSPENDABLE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_HOLDERS = {FunctionType: "__code__", FrameType: "f_code", GeneratorType: "gi_code", CoroutineType: "cr_code",
            AsyncGeneratorType: "ag_code"}  # fmt: skip
"""What holds code that may run, and where it holds it."""


def nested(code: CodeType) -> list[CodeType]:
    """``code`` and the code objects inside it."""
    found = [code]
    for outer in found:
        found += [const for const in outer.co_consts if isinstance(const, CodeType)]
    return found


def in_frames(spaces: Mapping[int, Collection[str]]) -> set[tuple[int, str]]:
    """Which names a frame of any thread may still look up; ``spaces``: names by the ``id`` of their globals."""
    used: set[tuple[int, str]] = set()
    for space, code in running() if spaces else ():
        if id(space) in spaces:
            named = {name for part in nested(code) for name in part.co_names}
            used.update((id(space), name) for name in named.intersection(spaces[id(space)]))
    return used


def outlived(codes: Iterable[CodeType], names: Iterable[str], losing: Collection[int]) -> set[str]:
    """Which of ``names`` something alive can still look up in a part of ``codes``.

    A generator that waits, or a function that was defined inside: both live on when the frame is gone. ``losing``:
    the ``id`` of each function that has one of ``codes`` and is about to lose it.
    """
    wanted = frozenset(names)
    suspects: dict[str, list[CodeType]] = {}
    for code in codes:
        outer, *inner = nested(code)
        for part in inner:
            for name in wanted.intersection(part.co_names):
                suspects.setdefault(name, []).append(part)
        if outer.co_flags & _SUSPENDABLE:
            for name in wanted.intersection(chain.from_iterable(part.co_names for part in (outer, *inner))):
                suspects.setdefault(name, []).append(outer)
    every = {id(part): part for parts in suspects.values() for part in parts}
    held = {
        id(getattr(holder, _HOLDERS[type(holder)])) for holder in _holders(every.values()) if id(holder) not in losing
    }
    return {name for name, parts in suspects.items() if not held.isdisjoint(map(id, parts))}


def _holders(codes: Collection[CodeType]) -> list[Any]:
    """It takes a walk over all that is alive."""
    return [holder for holder in gc.get_referrers(*codes) if type(holder) in _HOLDERS] if codes else []


def running() -> list[tuple[dict[str, Any], CodeType]]:
    """Globals and code of every frame of every thread. No frame is held: it would keep its variables alive."""
    found = []
    frames = list(sys._current_frames().values())
    while frames:
        frame: FrameType | None = frames.pop()
        while frame is not None:
            found.append((frame.f_globals, frame.f_code))
            frame = frame.f_back
    return found
