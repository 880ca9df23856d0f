"""Versions of packages: looked up once while a verb plans or reports, and anew by the next."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from patches.engine import gate


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


def test_an_error_leaves_nothing_that_is_remembered(module):
    def fails() -> None:
        gate.installed("made-up")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate.in_one_look(fails)
    module.__version__ = "2.0"
    assert gate.installed("made-up") == "2.0"
