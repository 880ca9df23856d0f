"""The skeleton that ``make new-patch`` writes: found by its folder, and red until somebody writes the patch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import new_patch

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("patch_id", "inside", "file"), [
    ("peft-adapters-fall-off", "", "peft/{}adapters_fall_off.py"),
    ("bitsandbytes-int8-scale-lost", "int8", "bitsandbytes/int8/{}scale_lost.py"),
    ("bitsandbytes-int8-scale-lost", "", "bitsandbytes/int8/{}scale_lost.py"),
    ("bitsandbytes-params4bit-scale-lost", "", "bitsandbytes/four_bit/{}params4bit_scale_lost.py"),
    ("bitsandbytes-linear4bit-scale-lost", "four_bit", "bitsandbytes/four_bit/{}linear4bit_scale_lost.py"),
])  # fmt: skip
def test_the_files_lie_where_patches_are_found(patch_id, inside, file):
    paths = [path.as_posix() for path in new_patch.files(patch_id, inside)]
    assert paths == ["patches/repairs/" + file.format(""), "tests/repairs/" + file.format("test_")]


@pytest.mark.parametrize(("patch_id", "inside", "said"), [
    ("numpy-is-slow", "", "one of the packages accelerate, axolotl"),
    ("peft", "", "is not an id"),
    ("peft-Foo", "", "is not an id"),
    ("bitsandbytes-scale-lost", "", "IN="),
    ("peft-scale-lost", "int8", "has the folders none"),
])  # fmt: skip
def test_what_cannot_be_a_patch_is_refused_in_words(patch_id, inside, said, capsys):
    assert new_patch.main([patch_id, "--inside", inside]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.release("where its files lie, and that no id is written that cannot be one")
def test_the_skeleton_is_found_and_red(tmp_path):
    for folder in ("bnb_patches", "patches", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "repairs" / "peft").mkdir(parents=True)

    def run(*command):
        return subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATCHES_AUTOLOAD": "0"},
        )

    assert run("tools.new_patch", "peft-adapters-fall-off").returncode == 0
    assert run("tools.new_patch", "peft-adapters-fall-off").returncode == 2, "never written over"
    found = run("patches", "verify", "peft-adapters-fall-off")
    assert found.returncode == 1, "an id that is not found is 2"
    assert "peft-adapters-fall-off has no reproducer yet" in " ".join(found.stdout.split()), (
        "what is to be written is named"
    )
    assert run("pytest", "-q", "-p", "no:cacheprovider", "tests/repairs/peft/test_adapters_fall_off.py").returncode == 1
