"""Every program of the catalogue, judged by :mod:`.rule`."""

from __future__ import annotations

import re

import pytest
from bitsandbytes import functional

from tests.conftest import _devices

from . import aot_worker
from .catalogue import PROGRAMS, Case, cases
from .known import FOUND, KNOWN, fault_of, marks
from .layers import KINDS
from .sequences import OPERATIONS
from .share import runs_daily
from .verdicts import Verdicts

PACKED = bool(getattr(functional, "has_avx512bf16", lambda: False)())
CASES = cases(_devices(), PACKED)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    """Of the cases that this run selects; with every pair of a case and a patch before a release."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    cases = (case for call in calls if isinstance(case := call.params.get("case"), Case))
    return Verdicts(cases, daily="not release" in request.config.getoption("markexpr"))


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    elsewhere = "the same on a plain processor" if PACKED else "the newest release, and another of the older ones"
    return [*marks(case.id, case.program.name), *([] if runs_daily(case) else [pytest.mark.release(elsewhere)])]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=_marks(case)) for case in CASES])
def test_program(case: Case, verdicts: Verdicts) -> None:
    judged = verdicts.of(case)
    assert not judged.faults, "\n".join([f"unpatched: {judged.unpatched}", *judged.faults])


def test_known_names_programs() -> None:
    ids = {f"{each.name}[{kind}]{where}" for each in PROGRAMS.values() for kind in each.kinds
           for where in ("", "@avx512bf16", "@cuda")}  # fmt: skip
    ids |= PROGRAMS.keys() | {f"sequences.{name}[{kind}]" for name in OPERATIONS for kind in KINDS}
    ids |= {f"aot_cache.{name}[{kind}]" for name in ("after_unpatched", "after_older") for kind in aot_worker.KINDS}
    assert not KNOWN.keys() - ids
    faults = {fault_of(name) for name in KNOWN}
    assert FOUND.keys() <= faults, "told, and nothing shows it"
    assert all(fault in FOUND or re.fullmatch("C([1-9]|1[0-8])", fault) for fault in faults)


def test_there_are_at_least_120_programs() -> None:
    assert len({case.program.name for case in CASES}) >= (30 if PACKED else 120)
