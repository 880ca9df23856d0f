"""Builds that are no plain release: from git, of a candidate, with a label, without source, with a number of its own."""

from __future__ import annotations

import compileall
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from patches import REGISTRY
from tests.newer_releases import copies, programs

pytestmark = copies.NEEDS_NEWEST
PARTS = {part.key: part for patch in REGISTRY.patches.values() for part in patch.parts}
KEY = "accelerate-left-on-device"
PEFT = "peft-dora-cache"
CHANGE = {
    "hooks.py": copies.replace(
        "def post_forward(self, module, output):", "def post_forward(self, module, output, *, late=1):"
    )
}


def only(package: str, found: dict[str, tuple[str, str]]) -> set[str]:
    """The status of each part of a package that is for it."""
    return {status for key, (status, _) in found.items() if key.startswith(f"{package}-")} - {
        "not affected", "not installed",
    }  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("version", ["1.16.0.dev0", "1.16.0+cu128", "1.16.0rc1", "1.16.0.dev0+g0a1b2c3", "1!1.16.0"])
def test_a_build_with_the_source_of_a_tested_release_is_known(tmp_path, version):
    copies.copy(tmp_path, "accelerate", version)
    found = programs.verdicts(tmp_path)
    status, reason = found[KEY]
    assert status == "available" and reason.startswith(
        f"accelerate {version} is newer than 1.15.0; the source is that of 1.1"
    )
    assert only("accelerate", found) == {"available"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("version", ["1.16.0.dev0", "1.16.0+cu128", "1.16.0rc1"])
def test_a_build_with_another_source_is_left_out(tmp_path, version):
    copies.copy(tmp_path, "accelerate", version, CHANGE)
    status, reason = programs.verdicts(tmp_path)[KEY]
    assert status == "untested" and f"accelerate {version} is newer than 1.15.0; " in reason
    assert "post_forward of accelerate.hooks is not that of 1.1" in reason


def test_a_version_that_cannot_be_read_is_left_out(tmp_path):
    """Whatever the source is: nobody knows which edits are for it."""
    copies.copy(tmp_path, "accelerate", "unknown")
    found = programs.verdicts(tmp_path)
    status, reason = found[KEY]
    assert status == "untested" and reason.startswith("the version of accelerate unknown cannot be read; ")
    assert "accelerate" not in {PARTS[key].package for key, (state, _) in found.items() if state == "available"}


def test_a_neighbour_whose_version_cannot_be_read_leaves_out_what_requires_it(tmp_path):
    copies.copy(tmp_path, "accelerate", "unknown")
    copies.copy(tmp_path, "bitsandbytes", copies.NUMBERS["bitsandbytes"])
    found = programs.verdicts(tmp_path)
    odd = {key: reason for key, (status, reason) in found.items() if status == "untested"}
    assert odd and all("the version of accelerate unknown cannot be read" in reason for reason in odd.values())
    assert only("bitsandbytes", found) >= {"available"}


def test_the_number_of_the_module_counts_where_the_metadata_are_old(tmp_path, forked, repaired):
    """An editable install after `git pull`: the metadata say 0.21.2, the module 0.22.0.dev0."""
    copies.copy(tmp_path, "peft", "0.22.0.dev0")
    (info,) = tmp_path.glob("*.dist-info")
    shutil.rmtree(info)
    said = forked(programs.reported("import bitsandbytes, peft"), **programs.environment(tmp_path, repaired))
    found = programs.Said(*json.loads(said.splitlines()[-1]))
    status, reason = found.results[PEFT]
    assert status == "applied" and "peft 0.22.0.dev0 is newer than" in reason and "the source is that of 0.21" in reason
    assert any("the imported module is version 0.22.0.dev0, its metadata says 0.21.2" in note for note in found.notes)
    assert not found.warnings


def test_a_package_in_a_zip_file_is_left_out_and_works(tmp_path, forked, repaired):
    files = tmp_path / "files"
    files.mkdir()
    copies.copy(files, "peft", "0.22.0")
    real(files / "peft")
    with zipfile.ZipFile(tmp_path / "peft.zip", "w") as zipped:
        for path in files.rglob("*"):
            if path.is_file():
                zipped.write(path, path.relative_to(files))
    left_out(tmp_path / "peft.zip", forked, repaired)


def test_a_package_without_source_is_left_out_and_works(tmp_path, forked, repaired):
    copies.copy(tmp_path, "peft", "0.22.0")
    real(tmp_path / "peft")
    compileall.compile_dir(tmp_path / "peft", quiet=2, legacy=True)
    for path in (tmp_path / "peft").rglob("*.py"):
        path.unlink()
    left_out(tmp_path, forked, repaired)


def test_one_module_without_source_leaves_out_what_rests_on_it(tmp_path):
    copies.copy(tmp_path, "peft", "0.22.0", {"utils/other.py": lambda text: text + "\n"})
    known = programs.verdicts(tmp_path)
    one = tmp_path / "peft" / "utils" / "other.py"
    compileall.compile_file(one, quiet=2, legacy=True)
    one.unlink()
    found = programs.verdicts(tmp_path)
    gone = {key for key in found if found[key] != known[key]}
    assert gone and {found[key][0] for key in gone} == {"untested"}
    assert all("its source cannot be compared" in found[key][1] for key in gone)
    assert only("peft", found) == {"available", "untested"}


def real(folder: Path) -> None:
    """Make files of links, and leave out what was compiled."""
    copied = folder.with_name("copied")
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder)
    copied.rename(folder)


def left_out(path: Path, forked, repaired) -> None:
    """peft in ``path`` can be imported, its patches are left out, and one line says so."""
    said = forked(programs.reported("import bitsandbytes, peft"), **programs.environment(path, repaired))
    found = programs.Said(*json.loads(said.splitlines()[-1]))
    status, reason = found.results[PEFT]
    assert (status, reason) == (
        "untested",
        f"peft 0.22.0 is newer than {reason.split()[5].rstrip(';')}; its source cannot be compared; "
        "to try it: patches.apply(untested=True) or PATCHES_UNTESTED=1",
    )
    (line,) = [text for text in found.warnings if "conflict" not in text]
    number = len(found.ids("untested")) + len(found.ids("conflict"))  # one of another package edits peft too
    assert f"{number} patches of peft 0.22.0" in line
    assert found.ids("applied") >= {"bitsandbytes-int8-copies"}
