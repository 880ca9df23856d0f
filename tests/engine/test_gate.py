"""Versions of packages: looked up once while a verb plans or reports, and anew by the next."""

from __future__ import annotations

import sys
from types import FrameType, ModuleType

import pytest

from patches.engine import gate
from patches.engine.report import Status
from tests.engine.conftest import patch


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("made_up")
    module.__version__ = "1.0"
    monkeypatch.setitem(sys.modules, "made_up", module)
    return module


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose metadata were searched for."""
    names: list[str] = []

    def search(name: str) -> None:
        names.append(name)

    monkeypatch.setattr(gate, "_metadata_version", search)
    return names


def test_one_look_asks_once_also_for_what_is_not_there(module, searched):
    def looks() -> list[str | None]:
        found = [gate.installed("made-up"), gate.installed("not-there")]
        module.__version__ = "2.0"
        return [*found, gate.installed("made-up"), gate.installed("not-there")]

    assert gate.in_one_look(looks) == ["1.0", None, "1.0", None]
    assert searched == ["not-there"]


def test_outside_of_it_and_in_the_next_one_it_is_looked_up_anew(module):
    for version in ("1.0", "2.0"):
        module.__version__ = version
        assert gate.installed("made-up") == gate.in_one_look(lambda: gate.installed("made-up")) == version


def test_one_in_another_looks_anew_as_in_an_import_that_a_plan_triggers(module):
    def outer() -> tuple[str | None, ...]:
        before = gate.installed("made-up")
        module.__version__ = "2.0"
        return before, gate.in_one_look(lambda: gate.installed("made-up")), gate.installed("made-up")

    assert gate.in_one_look(outer) == ("1.0", "2.0", "1.0")


def test_an_interrupt_at_any_bytecode_leaves_nothing_that_is_remembered(module):
    """Also in its last line, where it puts back what was there before."""

    def interrupted(at: int) -> bool:
        left = at

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal left
            if frame.f_code is not gate.in_one_look.__code__:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if event == "opcode" and not left:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            gate.in_one_look(lambda: gate.installed("made-up"))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    at = 1
    while interrupted(at):
        assert gate.remembered() is None, at
        at += 1
    if at == 1 and sys.version_info[:2] == (3, 12):
        pytest.skip("the first releases of Python 3.12 tell a tracer of no bytecode")
    assert at > (20 if sys.version_info[:2] in ((3, 11), (3, 12)) else 10), "the others need fewer bytecodes for it"


def test_an_error_leaves_nothing_that_is_remembered(module):
    def fails() -> None:
        gate.installed("made-up")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate.in_one_look(fails)
    module.__version__ = "2.0"
    assert gate.installed("made-up") == "2.0"


def test_a_version_that_cannot_be_read_is_untested_and_can_be_tried(module):
    known = patch("made-up-a", requires=("made-up>=1,<2",))
    module.__version__ = "unknown"
    verdict = gate.check(known)
    assert verdict.status is Status.UNTESTED and "the version of made-up unknown cannot be read" in verdict.reason
    assert gate.check(known, untested=True).status is Status.AVAILABLE


def test_a_container_of_nvidia_is_in_range(module):
    """Its torch is 2.6.0a0+ecf3bae40a.nv25.01: 16 of 17 patches were "not affected" there."""
    module.__version__ = "2.6.0a0+ecf3bae40a.nv25.01"
    known = patch("made-up-a", requires=("made-up>=2.6",), tested_up_to="2.13")
    assert gate.check(known).status is Status.AVAILABLE
    assert gate.check(known).versions == {"made-up": "2.6.0a0+ecf3bae40a.nv25.01"}
