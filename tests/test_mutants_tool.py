"""What the mutation checker changes, and that it says what lives."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from patches.engine import Finding, Part, Patch, Rewrite, SetAttribute
from patches.repairs.accelerate import refuses_offloaded_training
from tools import mutants

SOURCE = """
from patches.engine import Rewrite

def helper(x):
    alone = x.kind == "one"
    if alone:
        return 1
    return 2 if x else 3

def not_named(x):
    if x:
        return 1

EDIT = Rewrite("a:b", "c", "d(e)", names={"d": helper})
"""


def test_each_function_and_each_condition_is_changed():
    found = dict(mutants.mutants_of(SOURCE))
    assert [what.partition(": ")[2] for what in found] == [
        "helper does nothing",
        "`alone = x.kind == 'one'` is true",
        "`alone` is true",
        "nothing under `if alone`",
        "`x` is true",
    ]
    assert len({SOURCE, *found.values()}) == 6 and all(ast.parse(source) for source in found.values())
    assert all("def not_named(x):\n    if x:\n        return 1" in source for source in found.values())


def test_each_edit_for_the_installed_releases_is_left_out():
    """Those that a helper declares are as good as any; those for other releases are no loss here."""
    source, shared = "PATCH = Made", (Rewrite("a:B.f", "x\n.y"), SetAttribute("a:f", value=1, when="packaging<1"))
    patch = Patch("an-id", "", (), ("packaging>=1",), "1", (*shared, Rewrite("a:g", "z")), Finding)
    found = dict(mutants.without_an_edit(source, patch))
    assert list(found) == ["B.f: without the edit of `x .y`", "g: without the edit of `z`"]
    for changed, kept in zip(found.values(), (patch.edits[1:], patch.edits[:2]), strict=True):
        exec(changed, names := {"Made": patch})
        assert names["PATCH"].edits == kept
    assert not list(mutants.without_an_edit(source, dataclasses.replace(patch, edits=shared)))


def test_each_edit_of_a_part_is_left_out():
    one, two = (Part(name, ("packaging>=1",), "1", (Rewrite(f"a:{name}", "z"),), Finding) for name in ("f", "g"))
    patch = Patch("an-id", "", (), parts=(one, two))
    for changed, kept in zip(dict(mutants.without_an_edit("PATCH = Made", patch)).values(), ("g", "f"), strict=True):
        exec(changed, names := {"Made": patch})
        assert [edit.target for part in names["PATCH"].parts for edit in part.edits] == [f"a:{kept}"]


def test_every_patch_has_some_and_tests_are_found_by_name():
    file = mutants.ROOT / "patches/repairs/accelerate/refuses_offloaded_training.py"
    of_it = [mutant.what for mutant in mutants.of_patch(refuses_offloaded_training.PATCH, file)]
    assert any("`alone = " in what for what in of_it)
    tests = mutants.tests_of("accelerate-refuses-offloaded-training", file)
    assert tests == ["tests/repairs/accelerate/test_refuses_offloaded_training.py"]


def test_what_nothing_tests_lives_and_the_copy_is_as_before(tmp_path: Path):
    patch, test = tmp_path / "patch.py", tmp_path / "test_it.py"
    (tmp_path / "patches.py").write_text("")  # its verify finds nothing
    patch.write_text("X = 1\n")
    test.write_text("import patch\ndef test():\n    assert patch.X\n")
    one, other = (mutants.Mutant("an-id", "patch.py", "", source) for source in ("X = 0\n", "X = 2\n"))
    assert not mutants.lives(one, ["test_it.py"], tmp_path) and mutants.lives(other, ["test_it.py"], tmp_path)
    assert patch.read_text() == "X = 1\n"
