"""`nox -s newest` says in words what a release that nobody has tried means for each patch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_release_that_claims_to_be_newer_is_reported(tmp_path):
    """The metadata of bitsandbytes 99 over the code of the installed release: all of its patches drift."""
    info = tmp_path / "bitsandbytes-99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 99\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)])
    command = [sys.executable, str(ROOT / "tools" / "drift.py")]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "UNTESTED on bitsandbytes 99" in result.stdout
    assert "to look at." in result.stdout
