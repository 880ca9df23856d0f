"""A quantized model that does not fit, on older releases of transformers: the files of tests beside this one, run there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.from_pretrained.releases import RELEASES, ROOT, Release

HERE = "tests/repairs/transformers"
ALL = ["test_device_map_refused.py", *(f"test_does_not_fit_{part}.py" for part in ("models", "faults", "ends"))]
FEW = ["test_device_map_refused.py", f"{HERE}/test_does_not_fit_models.py"]
FEW += ["-k", "loaded_whole_and_offloaded and (nf4-plain or int8-quantized) or embedding-nf4 or buffer-int8"]
OLDEST = RELEASES[0]
"""Its loader is that of up to 4.56; that of 4.57 is met as a whole stack, and that of transformers 5 is the newest."""


def passes(release: Release, file: str, *options: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", f"{HERE}/{file}", *options)
    assert " passed" in said(release, "-m", "pytest", *options)


def said(release: Release, *command: str) -> str:
    if not release.is_installed:
        pytest.skip(
            f"transformers {release} is not in .stacks: `python -m tests.from_pretrained.releases --some 1` installs it"
        )
    path = os.pathsep.join(map(str, (release.folder, ROOT / ".bnb" / release.bitsandbytes, ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.release("verify on the stack transformers 4.57, and the files themselves on the newest release")
def test_four_programs():
    passes(OLDEST, *FEW)


@pytest.mark.release("test_four_programs, on the oldest of them")
@pytest.mark.parametrize("file", ALL)
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_all_programs(release, file):
    passes(release, file)


@pytest.mark.release("test_does_not_fit, on the newest release")
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_the_example(release):
    small = ("--device", "cpu", "--steps", "12", "--layers", "4")
    assert "merged, the same" in said(release, "examples/does_not_fit.py", *small)
