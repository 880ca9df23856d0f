"""`python -m tools.newest`, whole, on a release that claims to be newer than any that was tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.newer_releases.copies import NUMBERS, copy

ROOT = Path(__file__).resolve().parents[2]
IDS = ["bitsandbytes-params4bit-chunk", "bitsandbytes-int8-copies"]


@pytest.mark.release("what it says in each case, in the files beside this one")
def test_what_holds_would_be_raised(tmp_path):
    pytest.importorskip("torch")
    copy(tmp_path, "bitsandbytes", NUMBERS["bitsandbytes"])
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tools.newest", "--dry-run", *IDS]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"2 hold on bitsandbytes {NUMBERS['bitsandbytes']}: 2 on unchanged source" in done.stdout
    assert "Would raise `tested_up_to` of 2 in 2 files" in done.stdout
