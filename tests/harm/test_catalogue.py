"""Every program of the catalogue, judged by :mod:`.rule`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from bitsandbytes import functional

from patches.engine import gate
from tests.conftest import _devices
from tests.processor import ROOT
from tests.releases import is_daily

from . import aot_worker
from .catalogue import PROGRAMS, Case, cases
from .known import FOUND, KNOWN, fault_of, marks
from .layers import KINDS
from .sequences import OPERATIONS
from .share import runs_daily
from .verdicts import Verdicts, selected_cases

PACKED = bool(getattr(functional, "has_avx512bf16", lambda: False)())
CASES = cases(_devices(), PACKED)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    """Of the cases that this run selects; with every pair of a case and a patch before a release."""
    return Verdicts(selected_cases(request), daily=is_daily(request.config))


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


def test_every_program_that_is_written_is_run() -> None:
    """None is lost on the way from its file to a case; the pages say how many there are, in tens."""
    files = Path(__file__).with_name("programs").glob("*.py")
    functions = [
        node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    written = sum(
        any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(each))
        for each in functions
        if each.decorator_list
    )
    assert len(PROGRAMS) == written
    for page in ("README.md", "docs/add.md", "docs/how.md"):
        said = re.findall(r"(?i)over (\d+) programs", (ROOT / page).read_text())
        assert [*map(int, said)] == [(written - 1) // 10 * 10], page
    needs = {name: [each.when or "bitsandbytes", *({KINDS[kind].when for kind in each.kinds} if len(each.kinds) == 1 else ())]
             for name, each in PROGRAMS.items() if (each.packs if PACKED else each.packs != "only")}  # fmt: skip
    fit = {name for name, all_of in needs.items() if all(map(gate.satisfied, all_of))}
    int8_alone = {name for name in fit if all(kind.startswith("int8") for kind in PROGRAMS[name].kinds)}
    assert {case.program.name for case in CASES} == fit - (int8_alone if PACKED else set())
