"""What a maintainer is told: in words, when it is due, and of things that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.engine import requirement
from patches.engine.gate import Verdict
from patches.engine.report import Status
from patches.verification import PHASES, _judged
from tools.newest import advice

ROOT = Path(__file__).resolve().parent.parent
ID = "bitsandbytes-int8-copies"


def row(status: Status, *said: bool | None) -> dict:
    judged = _judged(
        REGISTRY.patches[ID].parts[0], Verdict(status, "why", {}), {p: (s, "figure") for p, s in zip(PHASES, said)}
    )
    return vars(judged)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(Status.AVAILABLE, "wrong"), (Status.UNTESTED, "skipped")],
    ids=["tested_up_to was raised", "nothing was done"],
)
def test_a_repair_of_upstream_that_was_forgotten_is_told_with_the_file_to_change(status, verdict):
    """tests/test_contract.py fails on both, with these words: the defect is gone, and the range goes on."""
    repaired = row(status, *[False] * (4 if status is Status.AVAILABLE else 1))
    assert repaired["verdict"] == verdict and repaired["findings"]
    said = advice.forgotten(repaired)
    assert "end the range in `requires`" in said and "int8/copies.py" in said.replace("\\", "/")


def test_once_the_range_ends_nothing_is_left_to_do():
    repaired = row(Status.NOT_AFFECTED, False)
    assert repaired["verdict"] == "ok"


def test_a_defect_that_is_still_there_is_not_called_repaired():
    assert advice.forgotten(row(Status.UNTESTED, True)) == "" == advice.forgotten(row(Status.AVAILABLE, None))


def test_the_range_of_a_patch_is_one_line():
    """What ends it is written once: the first of `requires`, in the file of the patch."""
    for patch in REGISTRY.patches.values():
        assert len([text for text in patch.requires if requirement.parse(text).name == patch.package]) == 1, patch.id


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", ".github/ISSUE_TEMPLATE/bug_report.md"])
def test_every_command_and_file_that_a_page_names_is_there(name):
    text = (ROOT / name).read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", text, re.M)) <= targets
    assert set(re.findall(r"python -m patches (\w+)", text)) <= {"list", "report", "diff", "verify"}
    for path in re.findall(r"\b(?:tests|tools|benchmarks)/[\w/.]*\w", text):
        assert (ROOT / path).exists(), path
    assert text.count("\n") <= 60, "a page"


def test_a_bug_report_asks_for_the_report():
    assert "python -m patches report" in (ROOT / ".github/ISSUE_TEMPLATE/bug_report.md").read_text("utf-8")
