"""`nox -s newest` says in words what a release that nobody has tried means for each patch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.newer_releases import copies
from tools import drift

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "status, finding, words",
    [
        ("conflict", (True, "crash"), "Write an edit for the new source"),
        ("conflict", (False, "equal"), "the defect is gone (equal): end the range in `requires`"),
        ("applied", (True, "crash"), "raise `tested_up_to`, then run `python -m patches verify some-id`"),
        ("applied", (False, "equal"), "end the range in `requires`"),
        ("applied", None, "cannot tell here (not run)"),
        ("failed", (True, "crash"), "applying it raised"),
    ],
)
def test_advice(status, finding, words):
    assert words in drift.advice({"id": "some-id", "status": status}, finding)


@pytest.mark.parametrize(
    "status, unpatched, words",
    [
        ("applied", (True, "crash"), "it goes in, and its reproducer contradicts it"),
        ("applied", (False, "equal"), "finds nothing without the patch, on a release of peft that has the defect"),
        ("applied", (None, "TypeError"), "breaks off"),
        ("not affected", (True, "crash"), "outside of the range in `requires`"),
    ],
)
def test_a_reproducer_that_contradicts_the_state(status, unpatched, words):
    row = {"id": "some-id", "status": status, "versions": {"peft": "1", "torch": "9"}}
    assert words in drift.contradiction(row, {"unpatched": unpatched})


@pytest.mark.release("what it says in each case, above")
def test_a_release_that_claims_to_be_newer_is_reported(tmp_path):
    """Code of the installed release under another number, with another base of a class that patches rest on: they drift."""
    change = copies.replace("class Int8Params(torch.nn.Parameter)", "class Int8Params(torch.nn.Parameter, object)")
    copies.copy(tmp_path, "bitsandbytes", "99", {"nn/modules.py": change})
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)])
    ids = ["bitsandbytes-int8-weights-without-scales", "bitsandbytes-int8-copies", "bitsandbytes-params4bit-copies"]
    command = [sys.executable, str(ROOT / "tools" / "drift.py"), *ids]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "UNTESTED on bitsandbytes 99" in result.stdout
    assert "3 patches: 1 available, 2 untested. 2 to look at." in result.stdout
