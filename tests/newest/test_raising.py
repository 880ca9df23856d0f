"""`make newest` raises `tested_up_to` of what holds: that one text of the file, or nothing."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.engine import Patch
from tools.newest import raising

NEW = version("packaging")
HEAD = "from patches.engine import Finding, Part, Patch\n\n\ndef defect():\n    return Finding(True)\n\n\n"
SINGLE = """PATCH = Patch(
    id="packaging-one",
    summary="é: 1.0",
    links=(),
    requires=("packaging>=1.0",),
    tested_up_to="1.0",  # not "1.0"
    defect=defect,
)
"""
PARTS = """def _part(name, requires, tested_up_to):
    return Part(name, requires, tested_up_to, (), defect)


PATCH = Patch(
    id="packaging-parts",
    summary="",
    links=(),
    parts=(
        Part("first", ("packaging>=1.0",), "1.0", (), defect),
        _part("second", ("packaging>=1.0",), "1.0"),
        Part("third", requires=("packaging>=1.0",), tested_up_to='1.0', edits=(), defect=defect),
    ),
)
"""
SHARED = """TESTED = "1.0"
PATCH = Patch(
    id="packaging-shared",
    summary="",
    links=(),
    parts=(
        Part("first", ("packaging>=1.0",), TESTED, (), defect),
        Part("second", ("packaging>=1.0",), TESTED, (), defect),
    ),
)
"""
NAMED = SINGLE.replace("PATCH =", '_ID = "packaging-one"\nPATCH =').replace('id="packaging-one"', "id=_ID")
COMPUTED = SINGLE.replace('"1.0",  # not "1.0"', '".".join("10"),')
LOOP = PARTS.replace('        _part("second"', '        *[_part("second"').replace('"1.0"),\n        Part("third"', '"1.0")],\n        Part("third"')  # fmt: skip


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Makes a repository of one file, in which a patch is declared; returns the patch and the file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text: str) -> tuple[Patch, Path]:
        file = tmp_path / "declared_here.py"
        file.write_text(HEAD + text, "utf-8")
        monkeypatch.delitem(sys.modules, "declared_here", raising=False)
        importlib.invalidate_caches()
        patch = importlib.import_module("declared_here").PATCH
        git(tmp_path, "init", "--quiet")
        commit(tmp_path)
        return patch, file

    yield make
    sys.modules.pop("declared_here", None)


def git(folder: Path, *command: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *command], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "declared_here.py")
    git(folder, "commit", "--quiet", "--message", "Declare it")


def raise_in(patch: Patch, file: Path, *names: str, dry_run: bool = False) -> raising.Raised:
    keys = [part.key for part in patch.parts if part.name in names or not names]
    return raising.raise_all([patch], keys, file.parent, dry_run)


@pytest.mark.parametrize("text", [SINGLE, NAMED], ids=["id", "name of the id"])
def test_the_value_of_a_patch_is_raised_and_nothing_else(repository, text):
    patch, file = repository(text)
    raised = raise_in(patch, file)
    assert raised == ({file: [patch.id]}, {})
    assert file.read_text("utf-8") == HEAD + text.replace('to="1.0"', f'to="{NEW}"')


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("first", '("packaging>=1.0",), "1.0", ()', f'("packaging>=1.0",), "{NEW}", ()'),
        ("second", '("packaging>=1.0",), "1.0"),', f'("packaging>=1.0",), "{NEW}"),'),
        ("third", "tested_up_to='1.0'", f"tested_up_to='{NEW}'"),
    ],
)
def test_of_several_parts_only_the_one_that_holds_is_raised(repository, name, old, new):
    patch, file = repository(PARTS)
    assert not raise_in(patch, file, name).refused
    assert file.read_text("utf-8") == HEAD + PARTS.replace(old, new)


def test_all_parts_of_a_file_are_raised_in_one_go(repository):
    patch, file = repository(PARTS)
    assert not raise_in(patch, file).refused
    importlib.reload(sys.modules["declared_here"])
    assert {part.tested_up_to for part in sys.modules["declared_here"].PATCH.parts} == {NEW}


def test_a_shared_constant_is_raised_if_all_that_read_it_hold(repository):
    patch, file = repository(SHARED)
    assert not raise_in(patch, file).refused
    assert file.read_text("utf-8") == HEAD + SHARED.replace('"1.0"\n', f'"{NEW}"\n')


def test_a_shared_constant_stays_if_another_part_reads_it(repository):
    patch, file = repository(SHARED)
    raised = raise_in(patch, file, "first")
    assert not raised.files and "is the value of other parts too" in raised.refused[patch.parts[0].key]
    assert file.read_text("utf-8") == HEAD + SHARED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (COMPUTED, "computes it"),
        (LOOP, "not written one by one"),
        (SINGLE.replace('    id="packaging-one",', '    **{"id": "packaging-one"},'), "declares packaging-one 0 times"),
        (SINGLE.replace('"1.0",  # not', '"1" ".0",  # not'), "does not say 1.0"),
    ],
)  # fmt: skip
def test_where_it_is_not_certain_which_text_it_is_the_file_stays(repository, text, why):
    patch, file = repository(text)
    raised = raise_in(patch, file)
    assert not raised.files and all(why in said for said in raised.refused.values())
    assert file.read_text("utf-8") == HEAD + text


def test_a_file_with_uncommitted_changes_stays(repository):
    patch, file = repository(SINGLE)
    file.write_text(HEAD + SINGLE + "# mine\n", "utf-8")
    raised = raise_in(patch, file)
    assert raised == ({}, {patch.id: "declared_here.py has uncommitted changes"})
    assert file.read_text("utf-8").endswith("# mine\n") and "to=\"1.0\"" in file.read_text("utf-8")  # fmt: skip
    commit(file.parent)
    assert raise_in(patch, file).files


def test_a_file_that_git_does_not_have_stays(repository):
    patch, file = repository(SINGLE)
    git(file.parent, "rm", "--quiet", "--cached", file.name)
    assert "uncommitted changes" in raise_in(patch, file).refused[patch.id]


def test_a_file_of_another_repository_stays(repository, tmp_path_factory):
    patch, file = repository(SINGLE)
    raised = raising.raise_all([patch], [patch.id], tmp_path_factory.mktemp("other"))
    assert not raised.files and "is not in" in raised.refused[patch.id]


def test_a_dry_run_says_what_would_be_raised(repository):
    patch, file = repository(SINGLE)
    assert raise_in(patch, file, dry_run=True).files == {file: [patch.id]}
    assert file.read_text("utf-8") == HEAD + SINGLE


@pytest.mark.parametrize("odd", ["5.25.0.dev0", "5.25.0rc1", "unknown", None])
def test_nothing_is_raised_to_a_release_that_is_not_final(odd):
    with pytest.raises(raising.Uncertain, match="no final release"):
        raising.new_release(odd)


def test_a_build_for_one_device_counts_as_its_release():
    assert raising.new_release("2.16.0+cpu") == "2.16.0"


@pytest.mark.parametrize("patch", REGISTRY.patches.values(), ids=lambda patch: patch.id)
def test_the_value_of_every_patch_is_found_in_its_file(patch):
    text = raising.file_of(patch).read_bytes()
    after, refused = raising.edited(text, [patch], {part.key: "99.0" for part in patch.parts})
    assert not refused
    assert after.count(b"99.0") == len(patch.parts) + text.count(b"99.0")
    assert ast.dump(ast.parse(after)).count("'99.0'") == len(patch.parts)
