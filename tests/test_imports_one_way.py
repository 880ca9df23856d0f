"""The contracts of pyproject.toml on who may import whom hold, and would be seen to break."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"

pytestmark = pytest.mark.skipif(
    find_spec("importlinter") is None, reason="import-linter is not installed here: the extra dev has it"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-c", LINT, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_imports_go_one_way():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("file, line, named", [
    ("engine/reading.py", "from .registry import Registry", "no circle of files in engine"),
    ("engine/gate.py", "from ..process import call_stack", "a room knows nothing of those above it"),
    ("quantized/accelerate_hooks.py", "from ..repairs.peft import merge_oft", "a room knows nothing of those above it"),
    ("offload/prefetch.py", "from ..experts import tensor", "a room knows nothing of those above it"),
    ("experts/packed_experts.py", "from . import tensor", "no circle of files in experts"),
    ("repairs/reproducers/graphs.py", "from ..peft import merge_oft", "the reproducers' models know no patch"),
    ("ranks.py", "from .api import apply", "a room knows nothing of those above it"),
])  # fmt: skip
def test_an_import_the_other_way_is_seen(tmp_path, file, line, named):
    shutil.copytree(ROOT / "patches", tmp_path / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "patches" / file
    path.write_text(path.read_text() + f"\n\ndef other_way():\n    {line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and any(named in said and "BROKEN" in said for said in done.stdout.splitlines())
