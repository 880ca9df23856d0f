"""Which global names of ours may still be looked up, by running frames and code objects: revert leaves these."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any


def with_nested_code(code: CodeType) -> list[CodeType]:
    """Return ``code`` and the code objects inside it."""
    found = [code]
    for outer in found:
        found += [const for const in outer.co_consts if isinstance(const, CodeType)]
    return found


def witnessed(code: CodeType) -> CodeType:
    """Add a constant to ``code`` and to the code inside it: a code object with the same names that never runs, the witness.

    Debuggers and profilers make new code of old code, by ``code.replace()`` or from its parts, and take over its constants.
    So a weak reference to the witness tells whether any code made of ``code`` is alive.
    """
    inner = [witnessed(const) if isinstance(const, CodeType) else const for const in code.co_consts]
    witness = compile("", code.co_filename, "exec").replace(co_names=code.co_names, co_firstlineno=code.co_firstlineno)
    return code.replace(co_consts=(*inner, witness))


def names_in_code(codes: Iterable[CodeType], names: Collection[str]) -> set[str]:
    """Return the ``names`` that ``codes``, or code inside them, look up."""
    return {name for code in codes for part in with_nested_code(code) for name in part.co_names if name in names}


def names_in_frames(names_by_globals: Mapping[int, Collection[str]]) -> set[tuple[int, str]]:
    """Return the names that a frame of any thread may still look up; by the ``id`` of its globals."""
    used: set[tuple[int, str]] = set()
    for namespace, code in globals_and_code_of_frames() if names_by_globals else ():
        if id(namespace) in names_by_globals:
            used.update((id(namespace), name) for name in names_in_code([code], names_by_globals[id(namespace)]))
    return used


def functions_with_code(codes: Iterable[CodeType], namespaces: Iterable[dict[str, Any]]) -> list[str]:
    """Name the functions with globals ``namespaces`` that run one of ``codes``, or code made of it; walk over all objects.

    It does not use ``gc.get_objects``: holding a tuple that another thread is just building makes ``tuple()`` fail there.
    """
    parts = {id(part) for code in codes for part in with_nested_code(code)}
    functions = [f for f in gc.get_referrers(*namespaces) if isinstance(f, FunctionType)] if parts else []
    found = [f for f in functions if any(id(part) in parts for part in with_nested_code(f.__code__))]
    return sorted({f"{f.__module__}.{f.__qualname__}" for f in found})


def globals_and_code_of_frames() -> list[tuple[dict[str, Any], CodeType]]:
    """Return globals and code of every frame of every thread, but no frame: it would keep its variables alive."""
    found = []
    frames = list(sys._current_frames().values())
    while frames:
        frame: FrameType | None = frames.pop()
        while frame is not None:
            found.append((frame.f_globals, frame.f_code))
            frame = frame.f_back
    return found
