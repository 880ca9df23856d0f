"""A patch that edits a package beside the one that it repairs is left out where the source of that package has changed."""

from __future__ import annotations

import pytest

from patches import REGISTRY, autoload
from patches.engine import gate
from patches.engine.edits import DeleteAttribute, SetAttribute
from patches.engine.report import Result, Status
from tests.engine.conftest import patch
from tests.newer_releases import copies, programs

ACCELERATE = copies.NUMBERS["accelerate"]
NAME = "peft-adapters-offloaded"
CHANGE = {
    "hooks.py": copies.replace("def attach_align_device_hook(\n", "def attach_align_device_hook(\n    *others,\n")
}


def test_each_part_knows_its_neighbours():
    assert REGISTRY.patches[NAME].parts[0].neighbours == ("accelerate",)
    assert REGISTRY.patches["bitsandbytes-params4bit-cast"].parts[0].neighbours == ("torch",)
    assert REGISTRY.patches["bitsandbytes-int8-copies"].parts[0].neighbours == ()


@copies.NEEDS_NEWEST
def test_it_is_applied_where_the_other_package_is_the_same_and_left_out_where_it_is_not(tmp_path):
    for name, change in (("same", None), ("changed", CHANGE)):
        (tmp_path / name).mkdir()
        copies.copy(tmp_path / name, "accelerate", ACCELERATE, change)
    same, changed = (programs.verdicts(tmp_path / name)[NAME] for name in ("same", "changed"))
    assert same == ("available", f"accelerate {ACCELERATE} is newer than 1.15.0; the source is that of 1.15.0")
    assert changed[0] == "untested"
    assert "attach_align_device_hook of accelerate.hooks is not that of 1.15.0" in changed[1]


@pytest.mark.parametrize("reason, named", [
    ("accelerate 1.16.0+local is newer than 1.15.0; hooks differ", "accelerate 1.16.0"),
    ("peft 0.22.0 is newer than 0.21.2; layers differ", "peft 0.22.0"),
    ("the version of torch odd cannot be read; no tested release can be compared", "peft 0.21.2"),
])  # fmt: skip
def test_the_line_of_the_log_names_the_release_that_is_newer(reason, named):
    assert autoload._newer_release(Result("peft-a", "", Status.UNTESTED, reason, {"peft": "0.21.2"})) == named


@pytest.fixture
def part(monkeypatch):
    installed = {"made-up": "1.0", "beside": "9.0"}
    monkeypatch.setattr(gate, "installed_version", lambda package, *_: installed.get(package))
    edits = (SetAttribute("made_up.layer:Layer.size", 1), DeleteAttribute("beside.hooks:Hook.old"))
    return patch("made-up-a", *edits, requires=("made-up>=1",), tested_up_to="1.0").parts[0]


@pytest.mark.parametrize("tested, answer, status, reason", [
    ({"beside": "8.0"}, (True, "the source is that of 8.0"), Status.AVAILABLE, "beside 9.0 is newer than 8.0; the source is that of 8.0"),
    ({"beside": "8.0"}, (False, "it differs"), Status.UNTESTED, "beside 9.0 is newer than 8.0; it differs"),
    ({"beside": "8.0"}, (True, ""), Status.AVAILABLE, ""),
    ({"beside": "9.0"}, (False, "it differs"), Status.AVAILABLE, ""),
    ({}, (False, "it differs"), Status.AVAILABLE, ""),
    ({"beside": "8.0"}, None, Status.AVAILABLE, ""),
])  # fmt: skip
def test_the_gate_asks_about_a_neighbour_that_is_newer_than_any_that_was_tested(
    part, tested, answer, status, reason, monkeypatch
):
    asked = []
    if answer is None:  # a version that cannot be read
        odd = {"made-up": "1.0", "beside": "odd"}
        monkeypatch.setattr(gate, "installed_version", lambda package, *_: odd.get(package))
    limits = gate.Limits(newest_tested=tested, on_newer=lambda *of: asked.append(of) or answer)
    verdict = gate.check(part, limits)
    assert (verdict.status, verdict.reason) == (status, reason)
    assert asked == ([(part, "beside", "9.0")] if answer and tested.get("beside") == "8.0" else [])
    assert gate.check(part, limits, untested=True).status is Status.AVAILABLE


def test_the_newest_release_of_a_package_is_that_of_all_patches():
    parts = [p for each in REGISTRY.patches.values() for p in each.parts]
    newest = gate.newest_tested(REGISTRY.patches.values())
    assert newest["torch"] == max(
        (p.tested_up_to for p in parts if p.package == "torch"), key=lambda v: [int(n) for n in v.split(".")]
    )
