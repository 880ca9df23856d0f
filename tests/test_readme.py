"""README.md says what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patches import REGISTRY
from patches.command_line import explain
from tools.readme import README, with_table

ROOT = Path(__file__).resolve().parent.parent
TEXT = README.read_text("utf-8")


def test_the_patch_table_is_that_of_the_registry():
    assert with_table(TEXT) == TEXT, "the table is out of date: run `make readme`"


def test_each_error_that_it_names_leads_to_its_patch():
    table = TEXT.partition("## Errors that it repairs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \| `(.+)` \| `([\w-]+)` \|$", table, re.MULTILINE)
    assert len(rows) >= 5
    assert not [row for row in rows if row[1] not in explain.matching(row[0], REGISTRY.patches)]


def test_every_make_target_and_file_that_it_names_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^ {4}|\$ )make ([a-z-]+)", TEXT, re.M))
    assert {"demo", "test"} <= named <= targets
    for path in re.findall(r"\]\(([\w./]+)\)|`((?:examples|patches|tests|tools)/[\w/.]+\.py)`", TEXT):
        assert (ROOT / (path[0] or path[1])).exists(), path


def test_every_environment_variable_that_the_code_reads_is_named():
    files = [ROOT / "bnb_patches_autoload.py", *(ROOT / "patches").rglob("*.py")]
    read = {name for file in files for name in re.findall(r'"(PATCHES_[A-Z_]+)"', file.read_text("utf-8"))}
    assert read and read <= set(re.findall(r"PATCHES_[A-Z_]+", TEXT))


def test_every_command_runs():
    for command in sorted(set(re.findall(r"python -m patches (\w+)", TEXT))):
        done = subprocess.run([sys.executable, "-m", "patches", command, "--help"], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, command
