"""Errors injected at every step of the engine: is the process ever left between before and after?

A step is the return of a function of the plugin, or one bytecode of it. A profile (or trace) hook raises there
once, and touches no code. After each error the process must be as it was before the call or as it is after it,
the report must say which, and the next call must work.

``python -m tests.engine.torture`` does it at every step, for the whole registry on what is installed; it takes an
hour or two. ``--every N`` takes one step in N, ``--verb`` one verb alone. The suite runs a seeded sample.
"""

from __future__ import annotations

import argparse
import enum
import gc
import itertools
import marshal
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import patches
from patches.engine import function_source
from patches.engine.build import Builder
from patches.engine.compiler import KeepingCompiler
from patches.engine.registry import Registry
from patches.engine.report import Status
from patches.engine.slots import slots_of

PLUGIN = str(patches.__path__[0])
ERRORS = (RuntimeError, KeyboardInterrupt, MemoryError, SystemExit)


class Fault:
    """Raises ``error`` at the ``at``-th step inside; counts steps if ``at`` is None."""

    def __init__(
        self, at: int | None = None, error: type[BaseException] = KeyboardInterrupt, fine: bool = False
    ) -> None:
        self.at, self.error, self.fine = at, error, fine
        self.count = 0
        self.where = ""

    def __enter__(self) -> Fault:
        (sys.settrace if self.fine else sys.setprofile)(self._traced if self.fine else self._profiled)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _step(self, frame: FrameType) -> None:
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            sys.settrace(None)
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            raise self.error("injected")

    def _profiled(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code.co_filename.startswith(PLUGIN):
            self._step(frame)

    def _traced(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PLUGIN):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._step(frame)
        return self._traced


Snapshot = dict[str, Any]


class Start(enum.Enum):
    """What the registry finds made when the verb is called."""

    WARM = "warm"
    """All, by itself."""
    KEPT = "kept"
    """Nothing; code was kept on disk by another process."""
    COLD = "cold"
    """Nothing, on disk neither: it writes there what it makes."""


class Subject:
    """A registry, the places that its patches may change, and what stands there."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.here = [p for p in registry.patches.values() if registry.is_for(p)]
        edits = [edit for patch in self.here for edit in registry.edits(patch)]
        self.slots = {slot.key: slot for edit in edits for slot, _ in slots_of(edit)}
        # Names that code of earlier tests needs stay. A whole cycle frees what the compiler kept of that code.
        registry.apply()
        registry.revert()
        gc.collect()
        registry.revert()
        self.before = self.snapshot()
        registry.apply()
        # Code by a copy: who keeps the code itself has a use for the names in it.
        self.after = {key: _Same(_copied(same.value)) for key, same in self.snapshot().items()}
        self.applied = {r.id for r in registry.report() if r.status is Status.APPLIED}
        registry.revert()
        assert self.snapshot() == self.before and self.before != self.after
        self._folder = tempfile.TemporaryDirectory()
        self.kept = Path(self._folder.name, "kept")

    def begin(self, start: Start) -> None:
        """Forget what was read and made, all that ``start`` says."""
        if start is Start.WARM:
            return
        function_source.forget_sources()
        self.registry._builder = Builder(KeepingCompiler(self.kept))
        if start is Start.COLD:
            self.kept.unlink(missing_ok=True)
        elif not self.kept.exists():
            self.registry.prepare()
            self.registry._builder = Builder(KeepingCompiler(self.kept))

    def snapshot(self) -> Snapshot:
        """What stands in each place, by identity; the values are kept alive."""
        return {str(key): _Same(slot.read()) for key, slot in self.slots.items()}

    def is_in(self, but_idle_names: bool = False) -> bool:
        """Whether all patches are in, or none; anything else fails.

        ``but_idle_names``: a name that was reverted stays until it was seen that no code uses it. An interrupt may
        come before; the next call sees to it.
        """
        now = self.snapshot()
        if all(now[key].is_like(self.after[key]) for key in now):
            return True
        torn = [key for key in now if now[key] != self.before[key]]  # the very objects
        if but_idle_names:
            idle = {str(key) for key, known in self.registry._store.read().slots.items() if not known.edits}
            torn = [key for key in torn if key not in idle]
        assert not torn, f"between before and after: {len(torn)} of {len(now)} places differ, such as {torn[:3]}"
        return False

    def says(self) -> bool:
        """What the report says, for all patches alike."""
        said = {r.id: r.status for r in self.registry.report() if r.id in self.applied}
        assert set(said.values()) in ({Status.APPLIED}, {Status.REVERTED}, {Status.AVAILABLE}), said
        return Status.APPLIED in said.values()


class _Same:
    """A value that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def is_like(self, other: _Same) -> bool:
        """The same, or made anew of the same code."""
        return self == other or _code(self.value) == _code(other.value) is not None


def _copied(value: Any) -> Any:
    code = _code(value)
    return value if code is None else marshal.loads(marshal.dumps(code))


def _code(value: Any) -> CodeType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, CodeType) else getattr(value, "__code__", None)


def interrupted(subject: Subject, verb: str, fault: Fault) -> bool:
    """One error in ``verb``, from the state in which it has work to do. Returns whether it was reached."""
    registry = subject.registry
    wanted = verb == "apply"
    if not wanted:
        registry.apply()
    reached = False
    try:
        with fault:
            getattr(registry, verb)()
    except fault.error:
        reached = True
    assert subject.says() == subject.is_in(but_idle_names=True), "the report tells the truth"
    getattr(registry, verb)()
    assert subject.is_in(but_idle_names=True) is wanted and subject.says() is wanted, "the next call works"
    registry.revert()
    if subject.registry._store.read().idle_names:  # the error, its frames and their code are garbage by now
        gc.collect()
        registry.revert()
    assert not subject.is_in()
    return reached


def torture(subject: Subject, verb: str, steps: Iterator[int], fine: bool = False, start: Start = Start.WARM) -> int:
    """Injects an error at each of ``steps``; returns at how many it was raised."""
    errors = itertools.cycle(ERRORS)
    reached = 0
    before = sys.unraisablehook
    # That of pytest keeps the frames of an error that ended a generator, and so code of ours. Of any other it is told.
    sys.unraisablehook = lambda told: None if str(told.exc_value) == "injected" else before(told)
    try:
        for at in steps:
            subject.begin(start)
            fault = Fault(at, next(errors), fine)
            try:
                reached += interrupted(subject, verb, fault)
            except AssertionError as error:
                raise AssertionError(f"{verb}, {fault.error.__name__} at step {at} ({fault.where}): {error}") from error
    finally:
        sys.unraisablehook = before
    return reached


def count(subject: Subject, verb: str, fine: bool = False, start: Start = Start.WARM) -> int:
    """How many steps there are."""
    for _ in range(2 if start is Start.WARM else 1):  # the first time versions are read, which are remembered
        if verb == "revert":
            subject.registry.apply()
        subject.begin(start)
        with Fault(fine=fine) as counter:
            getattr(subject.registry, verb)()
        subject.registry.revert()
    return counter.count


def everything() -> Subject:
    """The whole registry, on what is installed."""
    registry = patches.REGISTRY
    registry._builder = Builder()  # made from the source, to compare with what was kept
    for patch in registry.patches.values():
        if registry.is_for(patch):
            registry.import_targets(patch)
    return Subject(registry)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.torture", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="one step in so many")
    parser.add_argument("--verb", choices=("apply", "revert"), help="only this one")
    options = parser.parse_args()
    every, verbs = options.every, [options.verb] if options.verb else ["apply", "revert"]
    os.environ["PATCHES_AUTOLOAD"] = "0"
    subject = everything()
    # Each verb walks over what is alive. It does not see what is frozen, as it sees the toys of the suite.
    gc.collect(), gc.freeze()
    for verb, fine, start in itertools.product(verbs, (False, True), Start):
        if start is not Start.WARM and (fine or verb == "revert"):
            continue  # the same functions, entered a thousand times as often
        total = count(subject, verb, fine, start)
        steps = range(1 + random.Random(total).randrange(every), total + 1, every)
        kind = "bytecodes" if fine else "returns"
        reached = torture(subject, verb, iter(steps), fine, start)
        print(f"{verb}: {reached} of {total} {kind}, {start.value}: never between", flush=True)


if __name__ == "__main__":
    main()
