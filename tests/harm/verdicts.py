"""Every case judged: run unpatched, with all patches, and with each patch alone that it reaches.

Patches go in and out for a whole group of programs, not for each: that is what takes the time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from .catalogue import Case
from .reach import Entered, here, patches_reached
from .rule import Trace, fault
from .runner import Sets, plugin, run, run_layer
from .share import hands_over_daily, one_of_each, runs_here

NONE: frozenset[str] = frozenset()


@dataclass
class Judged:
    """What one case did, and why that breaks the rule."""

    unpatched: Trace
    reached: frozenset[str]
    patched: dict[str, Trace] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Verdicts:
    """The verdicts on ``cases``, each found when one of its group is asked for.

    ``daily``: a program runs with half of the patches alone, on one kind of layer that the patch reaches, one that compiles
    with one patch in 24, and one that hands over does so with a sixth of them. Without ``alone`` only with all patches.
    """

    def __init__(self, cases: Iterable[Case], daily: bool = False, alone: bool = True) -> None:
        self._daily = daily
        self._alone = alone
        self._groups: dict[str, list[Case]] = {}
        self._judged: dict[str, Judged] = {}
        for case in cases:
            self._groups.setdefault(case.group, []).append(case)

    def of(self, case: Case) -> Judged:
        if case.id not in self._judged:
            gc.collect()
            gc.freeze()  # what is alive is kept out of the walks by which patches look for damage: they take the time
            with _silent():
                self._judged |= _judge(self._groups[case.group], self._daily, self._alone)
        return self._judged[case.id]


def selected_cases(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Give the cases that this run selects, in the tests that have a parameter ``case``."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    return (case for call in calls if isinstance(case := call.params.get("case"), Case))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing is logged. Once for many programs: it goes through all loggers that there are."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _judge(cases: Sequence[Case], daily: bool, each_alone: bool) -> dict[str, Judged]:
    with plugin(NONE):
        found = [_unpatched(case) for case in cases]
    judged = {case.id: Judged(trace, _reached(case, entered)) for case, (trace, entered) in zip(cases, found)}
    everything = frozenset(here())
    for ids in (everything, *(frozenset({one}) for one in here() if each_alone)):
        alone = ids != everything
        chosen = [case for case in cases if not alone or all(_alone(case, judged[case.id], one) for one in ids)]
        if alone and daily:
            chosen = one_of_each(chosen, *ids)
        if not chosen:
            continue
        name = f"{next(iter(ids))} alone" if alone else "all patches"
        with plugin(ids):
            for case in chosen:
                _compare(case, judged[case.id], name, (ids, ids), alone)
        for case in chosen:
            if case.program.hands_over and (not (alone and daily) or hands_over_daily(case, *ids)):
                _compare(case, judged[case.id], f"{name}, handed over to none", (ids, NONE), alone=True)
                if not alone:
                    _compare(case, judged[case.id], f"none, handed over to {name}", (NONE, ids), alone=True)
    return judged


def _alone(case: Case, judged: Judged, patch_id: str) -> bool:
    return patch_id in judged.reached and runs_here(case, patch_id)


def _unpatched(case: Case) -> tuple[Trace, Entered]:
    entered = Entered()
    if case.program.compiles:
        run_layer(case, entered.tracing)
        return run(case, (NONE, NONE)), entered
    return run(case, (NONE, NONE), entered.tracing), entered


def _reached(case: Case, entered: Entered) -> frozenset[str]:
    return frozenset(here()) if case.may_crash else patches_reached(entered, case.program.compiles)


def _compare(case: Case, judged: Judged, name: str, sets: Sets, alone: bool) -> None:
    trace = judged.patched[name] = run(case, sets)
    may_raise, unrepaired = case.program.may_raise, case.program.unrepaired.get(case.kind)
    if found := fault(judged.unpatched, trace, alone or unrepaired is not None):
        judged.faults.append(f"with {name}: {found}")
    elif alone:
        return
    elif trace.error and not (may_raise and re.search(may_raise, trace.error.message)):
        judged.faults.append(f"with {name} it ends in {trace.error}, and does not say that it may (may_raise=...)")
    elif unrepaired is not None and _wrong(judged.unpatched) and not _wrong(trace):
        judged.faults.append(f"with {name} it is right: it is no longer true that {unrepaired} (unrepaired=...)")


def _wrong(trace: Trace) -> bool:
    return any(not check.right for check in trace.checks)
