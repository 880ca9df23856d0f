"""`make test` and `make check` run each test once, and a run that has lost its tests fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import suites


def pytest_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return subprocess.run(command, cwd=suites.TESTS.parent, env=os.environ, capture_output=True, text=True)


def collected(mark: str) -> set[str]:
    files = ["tests/engine/test_ids.py", "tests/test_layout.py", "tests/test_suites.py"]
    said = pytest_of("--collect-only", "-m", suites.MARKS[mark], *files).stdout
    return {line for line in said.splitlines() if "::" in line}


def test_a_test_belongs_to_one_of_the_two_commands():
    test, check, both = map(collected, suites.MARKS)
    assert test and check and not test & check and test | check == both


@pytest.mark.parametrize("name", suites.OF_TEST)
def test_the_files_of_make_test_are_there(name):
    assert (suites.TESTS / name).exists()


@pytest.mark.parametrize("least, code", [(1, 0), (10, 1)])
def test_a_run_that_passes_too_few_tests_fails(least, code):
    done = pytest_of("--at-least", str(least), "tests/test_suites.py", "-k", "files_of_make_test and engine")
    assert done.returncode == code, done.stdout
    assert ("1 tests passed, and at least 10 should" in done.stdout) == bool(code)
