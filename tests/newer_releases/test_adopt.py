"""``python -m patches adopt`` on a copy of bitsandbytes that has changed in four ways, and what a program gets then."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.engine.edits import Rewrite
from tests.newer_releases import copies, programs

pytestmark = copies.NEEDS_NEWEST
NUMBER = copies.NUMBERS["bitsandbytes"]
HELD, HARMFUL = "bitsandbytes-int8-load-state-dict", "bitsandbytes-int8-copies"
NOT_NEEDED, DOES_NOT_FIT = "bitsandbytes-int8-cast-loses-scale", "bitsandbytes-overrides"
PROGRAM = "load a Llama in INT8 and call it"
HARM = """import bitsandbytes.nn.modules as modules
    scale = 2 if "chunk" in vars(modules.Int8Params) else 1
    return torch.ops.bitsandbytes.int8_vectorwise_quant.default(A * scale, threshold)"""
"""A release that takes what a patch adds for its own."""


def repaired_cast(text: str) -> str:
    """The module of layers without the defect that ``NOT_NEEDED`` repairs."""
    (patch,) = REGISTRY.patches[NOT_NEEDED].parts
    for edit in REGISTRY.edits(patch):
        assert isinstance(edit, Rewrite) and edit.find in text
        text = text.replace(edit.find, edit.replace)
    return text


CHANGES = {
    "functional.py": copies.replace(
        "return torch.ops.bitsandbytes.int8_vectorwise_quant.default(A, threshold)", HARM
    ),
    "nn/modules.py": repaired_cast,
    "optim/optimizer.py": copies.replace(
        "self.pid2config[id(p)] = key_value_dict", "self.pid2config.update({id(p): key_value_dict})"
    ),
}  # fmt: skip
COMMAND = f"""
import sys
from patches import adoption
adoption.PROGRAMS = {{name: adoption.PROGRAMS[name] for name in [{PROGRAM!r}]}}
from patches.command_line import command
sys.exit(command())
"""
"""The command, with one program of those that it would run."""


def patches(*arguments: str, folder: Path, file: Path, source: str = "") -> subprocess.CompletedProcess[str]:
    env = programs.environment(folder, {**os.environ, "PATCHES_ADOPTED": str(file), "COLUMNS": "200"})
    command = [sys.executable, *(["-c", source] if source else ["-m", "patches"]), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    copies.copy(folder, "bitsandbytes", NUMBER, CHANGES)
    return folder


WAITING = "patches: verifying in fresh processes the patches that are not applied ...\n"
"""What a command says that takes longer than two seconds."""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("own") / "adopted.json"


@pytest.fixture(scope="module")
def adopted(folder, file) -> subprocess.CompletedProcess[str]:
    """What the command said about four patches."""
    return patches("adopt", HELD, HARMFUL, NOT_NEEDED, DOES_NOT_FIT, "--json", folder=folder, file=file, source=COMMAND)


@pytest.fixture(scope="module")
def rows(adopted) -> dict[str, dict[str, str]]:
    return {f"{row['id']}: {row['part']}".rstrip(": "): row for row in json.loads(adopted.stdout)["rows"]}


def test_what_does_not_fit_is_said_and_is_exit_code_1(adopted, rows):
    row = rows[f"{DOES_NOT_FIT}: list of parameters"]
    assert row["verdict"] == "does not fit" and "self.pid2config[id(p)]" in row["reason"]
    assert adopted.returncode == 1 and json.loads(adopted.stdout)["ok"] is False
    assert adopted.stderr.replace(WAITING, "") == ""


def test_a_patch_whose_defect_the_release_has_repaired_is_not_needed(rows):
    row = rows[NOT_NEEDED]
    assert row["verdict"] == "not needed" and row["reason"].startswith("the defect is not there")


def test_a_patch_that_changes_a_program_that_was_right_is_wrong(rows):
    row = rows[HARMFUL]
    assert row["verdict"] == "wrong"
    assert row["reason"] == f"a program that was right, {PROGRAM!r}: its result changes"


def test_what_held_is_remembered_and_nothing_else(adopted, rows, file):
    assert rows[HELD] == {"id": HELD, "part": "", "verdict": "held", "reason": ""}
    assert json.loads(adopted.stdout)["file"] == str(file) and not json.loads(adopted.stdout)["problem"]
    (entry,) = json.loads(file.read_text())["entries"]
    assert (entry["patch"], entry["on"]) == (HELD, datetime.date.today().isoformat())
    assert entry["versions"]["bitsandbytes"] == NUMBER
    assert entry["versions"]["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert re.fullmatch("[0-9a-f]{32}", entry["sources"])


def test_a_program_gets_what_held_from_then_on(adopted, folder, file, forked, repaired):
    source = programs.reported("import bitsandbytes, bitsandbytes.optim")
    env = programs.environment(folder, repaired)
    found = programs.Said(*json.loads(forked(source, **env, PATCHES_ADOPTED=str(file)).splitlines()[-1]))
    day = datetime.date.today().isoformat()
    said = f"bitsandbytes {NUMBER} is newer than 0.50.2; verified here on {day}"
    assert found.results[HELD] == ["applied", said]
    assert {HARMFUL, NOT_NEEDED, DOES_NOT_FIT} <= found.ids("untested")
    (line,) = found.warnings
    assert f"{len(found.ids('untested'))} patches of bitsandbytes {NUMBER}" in line


def verdict(folder: Path, file: Path) -> str:
    return programs.verdicts(folder, PATCHES_ADOPTED=str(file))[HELD][0]


def test_another_source_another_release_of_the_stack_and_another_number_make_it_void(adopted, file, tmp_path):
    later = {
        **CHANGES,
        "functional.py": copies.replace("int8_vectorwise_quant.default(A", "int8_vectorwise_quant.default(1 * A"),
    }
    cases = {
        "as it was": ({"bitsandbytes": (NUMBER, CHANGES)}, "available"),
        "changed once more": ({"bitsandbytes": (NUMBER, later)}, "untested"),
        "the next release": ({"bitsandbytes": ("0.51.1", CHANGES)}, "untested"),
        "another peft": ({"bitsandbytes": (NUMBER, CHANGES), "peft": (copies.NUMBERS["peft"], None)}, "untested"),
    }  # fmt: skip
    for name, (stack, expected) in cases.items():
        (tmp_path / name).mkdir()
        for package, (version, change) in stack.items():
            copies.copy(tmp_path / name, package, version, change)
        assert verdict(tmp_path / name, file) == expected, name


def test_it_can_be_forgotten(adopted, folder, file):
    kept = file.read_text()
    other = patches("adopt", "--forget", HARMFUL, folder=folder, file=file)
    assert (other.returncode, other.stdout) == (0, f"0 forgotten in {file}\n")
    assert verdict(folder, file) == "available"
    done = patches("adopt", "--forget", HELD, "--json", folder=folder, file=file)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"forgotten": 1, "file": str(file)})
    assert verdict(folder, file) == "untested"
    file.write_text(kept)
    assert patches("adopt", "--forget", folder=folder, file=file).stdout == f"1 forgotten in {file}\n"
    file.write_text(kept)


def test_there_is_nothing_to_adopt_on_tested_releases(tmp_path):
    done = patches("adopt", folder=tmp_path, file=tmp_path / "own.json")
    said = "nothing to adopt: no patch is held back by a release that is newer than the tested ones\n"
    assert (done.returncode, done.stdout, done.stderr.replace(WAITING, "")) == (0, said, "")
    assert not (tmp_path / "own.json").exists()


def test_an_unknown_id_is_exit_code_2(tmp_path):
    for more in ((), ("--forget",)):
        done = patches("adopt", "bitsandbytes-nonsense", *more, folder=tmp_path, file=tmp_path / "own.json")
        assert done.returncode == 2 and "no patch is named 'bitsandbytes-nonsense'" in done.stderr
        assert not done.stdout


@pytest.mark.release("the run of four patches with one program")
def test_all_that_one_harmless_change_leaves_out_is_held_with_all_programs(tmp_path):
    change = copies.replace(
        "int8_vectorwise_quant.default(A, threshold)", "int8_vectorwise_quant.default(1 * A, threshold)"
    )
    copies.copy(tmp_path, "bitsandbytes", NUMBER, {"functional.py": change})
    done = patches("adopt", folder=tmp_path, file=tmp_path / "own.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"remembered in {tmp_path / 'own.json'}" in done.stdout and "22 programs of ordinary users" in done.stdout
    found = programs.verdicts(tmp_path, PATCHES_ADOPTED=str(tmp_path / "own.json"))
    assert not [key for key, (status, _) in found.items() if status == "untested"]
