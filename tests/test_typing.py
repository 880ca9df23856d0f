"""What mypy tells a user about a program that calls the package: it is marked as typed, and each call has its type."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import patches

reveal_type(patches.apply("bitsandbytes-int8-copies", strict=True))
reveal_type(patches.report())
reveal_type(patches.report().results[0].status)
reveal_type(patches.revert())
reveal_type(patches.verify(jobs=1))
reveal_type(patches.inspect(object()))
reveal_type(patches.compile_options({"shape_padding": False}, mode="default"))
with patches.applied():
    reveal_type(patches.check_ranks())


@patches.applied("bitsandbytes-int8-copies")
def train(steps: int) -> float:
    return 1.0 / steps


reveal_type(train(2))
patches.apply(strict="yes")
patches.revert(1)
"""
# Reading these takes half a minute, and says nothing of this package.
SETTINGS = """
[mypy]
[mypy-torch.*,torchao.*,transformers.*,peft.*,accelerate.*,bitsandbytes.*,diffusers.*,numpy.*]
follow_imports = skip
"""
REVEALED = [
    "patches.engine.report.Report",
    "patches.engine.report.Report",
    "patches.engine.report.Status",
    "patches.engine.report.Report",
    "patches.verification.Verification",
    "patches.inspection.table.Inspection",
    "patches.inductor_options.CompileOptions",
    "patches.engine.report.Report",
    "float",
]

pytestmark = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed here: the extra dev has it")


def mypy(program: str, folder: Path, installed: Path) -> str:
    """What mypy says of ``program``, which lies alone in ``folder``; ``installed`` is where it finds the package."""
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text(SETTINGS)
    # Not MYPYPATH: what is found there is taken for the user's own code, marked or not.
    others = [place for place in sys.path if place and not Path(place, "patches").exists()]
    path = os.pathsep.join([str(installed), *others])
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", "cache", "program.py"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout


def test_each_call_has_its_type(tmp_path):
    said = mypy(PROGRAM, tmp_path, ROOT)
    assert re.findall(r'Revealed type is "([\w.]+)', said) == REVEALED
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert [re.search(r"\[([\w-]+)\]$", line).group(1) for line in errors] == ["arg-type", "arg-type"], said
    assert 'has incompatible type "str"' in errors[0] and 'has incompatible type "int"' in errors[1]


def test_without_the_mark_mypy_would_see_nothing(tmp_path):
    """That the test above can fail: a copy of the package that is not marked as typed."""
    unmarked = shutil.ignore_patterns("py.typed", "__pycache__")
    shutil.copytree(ROOT / "patches", tmp_path / "site/patches", ignore=unmarked)
    said = mypy("import patches\n", tmp_path, tmp_path / "site")
    assert "missing library stubs or py.typed marker" in said
