"""Whether a patch is for the installed releases: versions as containers and unusual builds give them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from patches.engine import gate
from patches.engine.registry import Registry
from patches.engine.report import Status
from tests.engine.conftest import patch


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("made_up")
    module.__version__ = "1.0"
    monkeypatch.setitem(sys.modules, "made_up", module)
    return module


def test_a_version_that_cannot_be_read_is_untested_and_can_be_tried(module):
    known = patch("made-up-a", requires=("made-up>=1,<2",))
    module.__version__ = "unknown"
    verdict = gate.check(known.parts[0])
    assert verdict.status is Status.UNTESTED and "the version of made-up unknown cannot be read" in verdict.reason
    assert gate.check(known.parts[0], untested=True).status is Status.AVAILABLE


def test_a_container_of_nvidia_is_in_range(module):
    """Its torch is 2.6.0a0+ecf3bae40a.nv25.01: 16 of 17 patches were "not affected" there."""
    module.__version__ = "2.6.0a0+ecf3bae40a.nv25.01"
    known = patch("made-up-a", requires=("made-up>=2.6",), tested_up_to="2.13")
    assert gate.check(known.parts[0]).status is Status.AVAILABLE
    assert gate.check(known.parts[0]).versions == {"made-up": "2.6.0a0+ecf3bae40a.nv25.01"}


def test_without_anyone_to_ask_a_newer_release_is_left_out(module):
    known = patch("made-up-a", requires=("made-up>=1",), tested_up_to="0.9")
    verdict = Registry([known]).verdict(known.parts[0])
    said = "made-up 1.0 is newer than 0.9; to try it: patches.apply(untested=True) or PATCHES_UNTESTED=1"
    assert (verdict.status, verdict.reason) == (Status.UNTESTED, said)
    assert not Registry([known]).is_for(known)


@pytest.mark.parametrize("applied, status", [(True, Status.AVAILABLE), (False, Status.UNTESTED)])
def test_who_is_asked_about_a_newer_release_decides(module, applied, status):
    asked = []

    def on_newer(part, package, version):
        asked.append((part.key, package, version))
        return applied, "because"

    known = patch("made-up-a", requires=("made-up>=1",), tested_up_to="0.9")
    verdict = Registry([known], limits=gate.Limits(on_newer=on_newer)).verdict(known.parts[0])
    assert (verdict.status, verdict.reason) == (status, "made-up 1.0 is newer than 0.9; because")
    assert asked == [("made-up-a", "made-up", "1.0")]


@pytest.mark.parametrize("requires, tested", [("made-up>=1", "1.0"), ("made-up>=2", "0.9"), ("absent-package", "0.9")])
def test_nobody_is_asked_where_the_answer_is_known(module, requires, tested):
    def on_newer(part, package, version):
        raise AssertionError("asked")

    known = patch("made-up-a", requires=(requires,), tested_up_to=tested)
    assert gate.check(known.parts[0], gate.Limits(on_newer=on_newer)).status is not Status.UNTESTED
    newer = patch("made-up-a", requires=("made-up>=1",), tested_up_to="0.9")
    assert gate.check(newer.parts[0], gate.Limits(on_newer=on_newer), untested=True).status is Status.AVAILABLE
