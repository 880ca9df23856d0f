"""Random sequences of operations on one layer, judged after each by the rule of the catalogue.

The same examples in every run. ``HARM_EXAMPLES=2000`` looks at that many, new ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .catalogue import Case
from .known import marks
from .layers import NF4
from .reach import here
from .rule import Trace, fault
from .runner import plugin, run
from .sequences import OPERATIONS, sequence
from .verdicts import NONE

KINDS = (*NF4, "int8")
MORE = int(os.environ.get("HARM_EXAMPLES", "0"))
EXAMPLES = settings(
    max_examples=MORE or 60,
    derandomize=not MORE,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


EVERYTHING = (frozenset(here()), frozenset(here()))
PREFIXES: tuple[tuple[str, ...], ...] = ((), ("take_a_step",), ("evaluate", "infer_one_row"))


def case(kind: str, names: Sequence[str]) -> Case:
    program = SimpleNamespace(name="sequences", body=sequence(names), options={}, crashes=False, compiles=False)
    return Case(program, kind, "cpu", packed=False)  # type: ignore[arg-type]


def told(unpatched: Trace, patched: Trace) -> str:
    """The fault of the patches, if there is one."""
    found = fault(unpatched, patched)
    return found and f"{found}\nunpatched: {unpatched}\npatched:   {patched}"


def known(kind: str, name: str) -> bool:
    return bool(marks(f"sequences.{name}[{kind}]"))


@pytest.fixture(scope="module")
def single() -> dict[tuple[str, str], list[str]]:
    """The faults of each operation on each kind of layer: by itself, after a training step, after an evaluation."""
    cells = [(kind, name) for kind in KINDS for name in OPERATIONS]
    cases = {cell: [case(cell[0], [*before, cell[1]]) for before in PREFIXES] for cell in cells}
    unpatched = {cell: [run(each, (NONE, NONE)) for each in cases[cell]] for cell in cells}
    with plugin(EVERYTHING[0]):
        patched = {cell: [run(each, EVERYTHING) for each in cases[cell]] for cell in cells}
    return {cell: list(map(told, unpatched[cell], patched[cell])) for cell in cells}


@pytest.mark.parametrize(
    "kind, name",
    [pytest.param(k, n, id=f"{n}[{k}]", marks=marks(f"sequences.{n}[{k}]")) for k in KINDS for n in OPERATIONS],
)
def test_one_operation(kind: str, name: str, single: dict[tuple[str, str], list[str]]) -> None:
    assert not any(single[kind, name]), "\n".join(single[kind, name])


@EXAMPLES
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_sequences(data: st.DataObject, kind: str) -> None:
    """Several, one after the other; those that are known to be faulty by themselves are left out."""
    good = [name for name in OPERATIONS if not known(kind, name)]
    names = data.draw(st.lists(st.sampled_from(good), min_size=2, max_size=8), label="operations")
    drawn = case(kind, names)
    assert not (found := told(run(drawn, (NONE, NONE)), run(drawn, EVERYTHING))), found
