"""Which patches a program reaches: those that edit a function that it enters, or a class that it touches.

Generous rather than exact. A rewritten function counts when it is entered. An attribute that a patch sets on a
class may be reached in ways that no tracer shows (a property, ``__reduce_ex__`` from a pickler written in C), so it
counts when any method of that class is entered, and on a module when any of its functions is.

Where a program compiles, what is compiled is not entered. It reaches what its layer enters in eager, and of the
attributes those that Dynamo asks for by itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

from patches import REGISTRY
from patches.engine import needs
from patches.engine.compiler import Compiler
from patches.engine.edits import Rewrite
from patches.engine.slots import CodeSlot, slots_of

USED = ("bitsandbytes", "accelerate", "transformers", "peft")
"""The packages that programs use: every module of theirs that a patch edits is imported."""


class Entered(set[CodeType]):
    """The functions that were entered while :meth:`tracing`, by their code."""

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.add(frame.f_code)


@functools.cache
def here() -> tuple[str, ...]:
    """The patches that are for this stack, and whose modules programs import."""
    found = []
    for patch in REGISTRY.patches.values():
        if patch.package in USED:
            REGISTRY.import_targets(patch)
        if REGISTRY.is_for(patch) and not needs.modules_not_imported(patch):
            found.append(patch.id)
    return tuple(found)


def patches_reached(entered: Iterable[CodeType], compiles: bool = False) -> frozenset[str]:
    """The ids of the patches that edit what was ``entered``. The process is unpatched."""
    codes = frozenset(entered)
    return frozenset(patch_id for patch_id in here() if not codes.isdisjoint(_codes(patch_id, compiles)))


@functools.cache
def _codes(patch_id: str, compiles: bool) -> frozenset[CodeType]:
    """The functions by which a program reaches the patch."""
    found: set[CodeType] = set()
    for edit in REGISTRY.edits(REGISTRY.patches[patch_id]):
        for slot, change in slots_of(edit):
            if not isinstance(edit, Rewrite):
                found |= set() if compiles and not _asked_by_dynamo(slot, change) else _functions_of(slot.held())
            elif isinstance(slot, CodeSlot):
                found.add(slot.read())
        if edit.target.endswith(".backward"):  # on an accelerator it runs in a thread that is not traced
            forward = Rewrite(edit.target.removesuffix("backward") + "forward", "x", "x")
            found |= {slot.read() for slot, _ in slots_of(forward)}
    return frozenset(found)


def _asked_by_dynamo(slot: Any, change: Any) -> bool:
    if slot.attribute in ("__torch_function__", "__getattr__"):
        return True
    return isinstance(slot.build(slot.read(), [change], Compiler()), property)


def _functions_of(owner: type | ModuleType) -> set[CodeType]:
    found = set()
    for value in vars(owner).values():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(code := getattr(inner, "__code__", None), CodeType):
            found.add(code)
    return found
