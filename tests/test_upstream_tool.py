"""The comparison of the tests of bitsandbytes and peft, on small folders of tests that look at the plugin."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.upstream import project_of, report

TESTS = """
import os

def test_same():
    pass

def test_fails_with_the_plugin():
    assert os.environ["PATCHES_AUTOLOAD"] == "0"

def test_linear_kbit_fp32_bias():
    assert os.environ["PATCHES_AUTOLOAD"] == "0"

def test_fails_both_ways():
    assert not os.environ["PATCHES_AUTOLOAD"]
"""


def upstream(folder, *arguments):
    command = [sys.executable, "-m", "tools.upstream", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_difference_is_found_and_one_that_is_expected_explained(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").touch()
    (folder / "test_it.py").write_text(TESTS)
    done = upstream(folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "unpatched  1 failure, 3 passed\npatched    3 failure, 1 passed\n" in done.stdout
    assert "test_fails_with_the_plugin\n    unpatched  passed\n    patched    failure" in done.stdout
    assert done.stdout.count("expected: it") == 1 and "test_fails_both_ways" not in done.stdout
    assert "\n1 in both runs: failure: AssertionError: assert not '" in done.stdout


@pytest.mark.release("the same without a choice")
def test_some_of_them(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").touch()
    (folder / "test_it.py").write_text(TESTS)
    some = upstream(folder, "--every", "2", "-k", "not same")  # the first and the third of three
    assert "unpatched  1 failure, 1 passed\npatched    2 failure\n" in some.stdout, some.stdout + some.stderr


def test_what_is_no_folder_of_tests_is_refused(tmp_path):
    done = upstream(tmp_path)
    assert done.returncode == 2 and "is not the folder" in done.stderr


def test_what_is_better_is_no_fault(capsys):
    before = {"a::test_one": "failure: it", "b::test_two": "passed"}
    assert report([before, {"a::test_one": "passed", "b::test_two": "passed"}]) == 0
    assert "better" in capsys.readouterr().out
    assert report([before, {"a::test_one": "skipped", "b::test_two": "error: it"}]) == 2


@pytest.mark.release("make test-all TESTS=<checkouts> runs the tests of peft themselves")
def test_what_peft_asks_the_hub_for_is_built_here(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "testing_common.py", "__init__.py"):
        (folder / name).touch()
    (folder / "testing_utils.py").write_text("_HUB_MODEL_ACCESSES = {}\n")
    (folder / "test_quantization.py").write_text(PEFT)
    assert project_of(folder).name == "peft"
    done = upstream(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unpatched  1 passed\npatched    1 passed\n" in done.stdout


PEFT = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from . import testing_utils

def test_loads():
    name = "peft-internal-testing/opt-125m"
    assert name in testing_utils._HUB_MODEL_ACCESSES
    assert len(AutoModelForCausalLM.from_pretrained(name).model.decoder.layers) == 12
    assert AutoTokenizer.from_pretrained(name)("a").input_ids
"""
