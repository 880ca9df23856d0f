"""Whether code that was taken out may still run: in a frame that was entered before, or in a function made there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Mapping
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any

_SUSPENDABLE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_HOLDERS = (FunctionType, FrameType, GeneratorType, CoroutineType, AsyncGeneratorType)


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


def outlives(codes: Iterable[CodeType], name: str) -> bool:
    """Whether something alive can still run a part of ``codes`` that names ``name``.

    A generator that waits, or a function that was defined inside: both live on when the frame is gone.
    """
    suspects: list[CodeType] = []
    for code in codes:
        outer, *inner = nested(code)
        suspects += [part for part in inner if name in part.co_names]
        if outer.co_flags & _SUSPENDABLE and any(name in part.co_names for part in nested(outer)):
            suspects.append(outer)
    return bool(suspects) and any(isinstance(holder, _HOLDERS) for holder in gc.get_referrers(*suspects))


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
