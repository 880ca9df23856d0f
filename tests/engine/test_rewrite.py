"""A rewrite: exactly what it says, on the same function object, or nothing at all."""

from __future__ import annotations

import importlib
import sys
import traceback

import pytest

from patches.engine.edits import Rewrite
from patches.engine.report import Status
from patches.engine.match import check


def test_expression_statement_and_removed_statement(toy, registry):
    r = registry(
        (Rewrite("toy:plain", "x + k", "x + k + 1"),),
        (Rewrite("toy:plain", "y = y * 2\nk = 0", "y = y * 10"),),
    )
    r.apply(strict=True)
    assert toy.plain(1) == 3 and toy.plain(5) == 70
    r.revert("a")
    assert toy.plain(5) == 60
    r.revert()
    assert toy.plain(5) == 12
    registry((Rewrite("toy:plain", "y = y * 2", ""),)).apply(strict=True)
    assert toy.plain(5) == 6


def test_to_a_call_of_a_function_by_its_own_name(toy, registry):
    def tenfold(x, k):
        return 10 * x + k

    edit = Rewrite.to_call("toy:plain", "x + k", tenfold, "x, k", when="packaging")
    assert edit == Rewrite(
        "toy:plain", "x + k", "_patches_tenfold(x, k)", names={"_patches_tenfold": tenfold}, when="packaging"
    )
    before = toy.plain(1)
    registry((Rewrite.to_call("toy:plain", "x + k", tenfold, "x, k"),)).apply(strict=True)
    assert toy.plain(1) != before


def test_super_mangling_static_class_property_wrapped_and_closure(toy, registry):
    alias, bound = toy.wrapped, toy.Derived().use
    r = registry(
        (
            Rewrite("toy:Derived.who", "'derived'", "'DERIVED'"),
            Rewrite("toy:Derived.use", "self.__mangled(5)", "self.__mangled(6)"),
            Rewrite("toy:Base.static", "a - 1", "a + 1"),
            Rewrite("toy:Base.made", "(cls, a)", "(a, cls)"),
            Rewrite("toy:Base.size", "1", "2"),
            Rewrite("toy:wrapped", "x + 1", "x + 7"),
            Rewrite("toy:closure", "x + q", "x - q"),
        ),
    )
    r.apply(strict=True)
    assert toy.Derived().who() == "baseDERIVED"
    assert bound() == 6, "a method bound before the patch sees it"
    assert toy.Base.static(None, 1) == 2
    assert toy.Derived.made(3) == (3, toy.Derived)
    assert toy.Base().size == 2
    assert alias(1) == 8, "an alias taken before the patch sees it"
    assert toy.closure(1) == -9
    r.revert()
    assert (toy.Derived().who(), bound(), alias(1), toy.closure(1)) == ("basederived", 5, 2, 11)


def test_removing_the_only_use_of_a_free_variable_keeps_the_closure(toy, registry):
    registry(
        (
            Rewrite("toy:closure", "x + q", "x"),
            Rewrite("toy:Derived.who", "super().who()", "'no super'"),
        )
    ).apply(strict=True)
    assert toy.closure(1) == 1
    assert toy.Derived().who() == "no superderived"


def test_a_traceback_points_at_the_line_in_the_file(toy, registry):
    fail = toy.Derived.Inner().fail

    def last_frame() -> traceback.FrameSummary:
        with pytest.raises(ValueError) as caught:
            fail(3)
        return traceback.extract_tb(caught.value.__traceback__)[-1]

    before = last_frame()
    registry((Rewrite("toy:Derived.Inner.fail", "a + b", "(\na\n*\nb\n)"),)).apply(strict=True)
    after = last_frame()
    assert (after.filename, after.lineno, after.line) == (before.filename, before.lineno, before.line)
    with pytest.raises(ValueError, match="6"):
        fail(3)


def test_names_are_globals_of_the_module_only_while_it_is_active(toy, registry):
    def tenfold(x):
        return 10 * x

    edit = Rewrite("toy:plain", "y * 2", "_patches_tenfold(y)", names={"_patches_tenfold": tenfold})
    r = registry((edit,), (Rewrite("toy:wrapped", "x + 1", "_patches_tenfold(x)", names=dict(edit.names)),))
    r.apply(strict=True)
    assert (toy.plain(5), toy.wrapped(2)) == (60, 20)
    r.revert("a")
    assert toy.wrapped(2) == 20, "another patch still needs the name"
    r.revert()
    assert "_patches_tenfold" not in vars(toy)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Rewrite("toy:plain", "x + k", "x", count=2), "occurs 1 times, expected 2"),
        (Rewrite("toy:plain", "x + z", "x"), "occurs 0 times, expected 1"),
        (Rewrite("toy:absent", "x", "y"), "no such function"),
        (Rewrite("toy:Absent.method", "x", "y"), "no class Absent"),
        (Rewrite("toy:Base", "x", "y"), "not a Python function"),
        (Rewrite("toy:Derived.use", "5", "super().who()"), "would change the closure"),
    ],
)
def test_what_does_not_fit_is_a_conflict_and_changes_nothing(toy, registry, edit, why):
    before = dict(vars(toy)), toy.plain.__code__
    r = registry((Rewrite("toy:wrapped", "x + 1", "x + 2"), edit))
    result = r.apply()["a"]
    assert result.status is Status.CONFLICT and why in result.reason
    assert (dict(vars(toy)), toy.plain.__code__) == before
    assert toy.wrapped(1) == 2, "the patch is atomic: its other edit was not made either"


def test_two_edits_on_the_same_nodes_are_a_conflict(toy, registry):
    r = registry((Rewrite("toy:plain", "x + k", "x"),), (Rewrite("toy:plain", "y = x + k", "y = 0"),))
    results = r.apply()
    assert [x.status for x in results] == [Status.APPLIED, Status.CONFLICT]
    assert "overlaps" in results["b"].reason
    assert toy.plain(2) == 2, "the first holds, the second changed nothing"


def test_an_edit_that_two_patches_declare_is_made_once_and_stays_for_the_second(toy, registry):
    def shared():
        return Rewrite("toy:plain", "x + k", "_patches_sum(x, k)", names={"_patches_sum": max})

    r = registry((shared(), Rewrite("toy:plain", "y * 2", "y * 3")), (shared(),))
    original = toy.plain.__code__
    assert [x.status for x in r.apply()] == [Status.APPLIED, Status.APPLIED]
    assert toy.plain(5) == 15
    r.revert("a")
    assert toy.plain(5) == 10
    r.apply("a")
    r.revert("b")
    assert toy.plain(5) == 15
    r.revert()
    assert toy.plain.__code__ is original


def test_a_file_that_changed_since_the_import_is_a_conflict(toy, registry, tmp_path):
    text = (tmp_path / "toy.py").read_text()
    (tmp_path / "toy.py").write_text(text.replace("y = y * 2", "y = y * 3"))
    result = registry((Rewrite("toy:plain", "x + k", "x"),)).apply()["a"]
    assert result.status is Status.CONFLICT
    assert "differs from the imported code" in result.reason
    assert toy.plain(5) == 12


def test_no_source_to_read_is_a_conflict(toy, registry):
    namespace: dict = {"__name__": "toy"}
    exec(compile("def made(x):\n    return x", "<no file>", "exec"), namespace)
    toy.made = namespace["made"]
    result = registry((Rewrite("toy:made", "x", "x + 1"),)).apply()["a"]
    assert result.status is Status.CONFLICT and "no source file at" in result.reason
    assert toy.made(1) == 1


@pytest.mark.parametrize(
    "edit",
    [Rewrite("m:f", ""), Rewrite("m:f", " \n"), Rewrite("m:f", "a +", "b"), Rewrite("m:f", "a", "b +")],
)
def test_an_edit_that_makes_no_sense_is_named_by_check(edit):
    with pytest.raises((SyntaxError, ValueError)):
        check(edit)


def test_diff_shows_one_line_where_a_file_has_many_functions_that_are_alike(write_module, registry):
    """Compared as a whole file, difflib finds other lines that are equal."""
    body = "".join(f"    x = g{i}(x)\n" for i in range(20))
    importlib.import_module(
        write_module("alike", "\n\n".join(f"def f{i}(x):\n{body}    return x\n" for i in range(12)))
    )
    r = registry((Rewrite("alike:f11", "g4(x)", "other(x)"),))
    r.apply(strict=True)
    changed = [line for line in r.report().diff().splitlines()[2:] if not line.startswith(" ")]
    assert changed == ["@@ -267,7 +267,7 @@", "-    x = g4(x)", "+    x = other(x)"]


def test_diff_shows_the_lines_of_the_file(toy, registry):
    r = registry((Rewrite("toy:plain", "y > 3", "y > 3 and k"),))
    r.apply(strict=True)
    diff = r.report().diff()
    assert "--- a/toy.py\n+++ b/toy.py\n" in diff
    assert "-    if y > 3:\n+    if y > 3 and k:\n" in diff
    number = 1 + open(toy.__file__).read().splitlines().index("    if y > 3:")
    assert f"@@ -{number - 3},7 +{number - 3},7 @@" in diff


@pytest.mark.parametrize("name", ["closing_line", "module_taken", "module_imported", "no_code_at_the_end"])
def test_the_quick_reading_of_a_source_gives_way_to_the_exact_one(tmp_path, monkeypatch, registry, name):
    """Its end is not where its code ends, or what looks imported was not: both are read all the same."""
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    function = getattr(importlib.import_module("odd"), name)
    before = function("a")
    r = registry((Rewrite(f"odd:{name}", "'b'", "'c'"),))
    r.apply(strict=True)
    assert function("a") == before.replace("b", "c") != before
    assert r.report().diff().count("\n-") == 1, "one line"
    r.revert()
    assert function("a") == before
    monkeypatch.delitem(sys.modules, "odd")


ODD = """
import os.path
import posixpath

taken = os.path


def closing_line(x):
    return (
        x
        + 'b'
    )


def module_taken(x):
    return taken.join(x, 'b')


def module_imported(x):
    return posixpath.join(x, 'b')


def no_code_at_the_end(x):
    if x:
        return x + 'b'
    return x
    pass
"""
