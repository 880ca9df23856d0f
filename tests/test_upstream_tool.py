"""The comparison of bitsandbytes' own tests, on a small folder of tests that looks at the plugin."""

from __future__ import annotations

import subprocess
import sys

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


def upstream(folder):
    return subprocess.run([sys.executable, "-m", "tools.upstream", str(folder)], capture_output=True, text=True)


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


def test_what_is_no_folder_of_tests_is_refused(tmp_path):
    done = upstream(tmp_path)
    assert done.returncode == 2 and "is not the folder" in done.stderr
