"""Whether a patch is for the installed releases: versions as containers and unusual builds give them."""

from __future__ import annotations

import sys
from types import ModuleType

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
