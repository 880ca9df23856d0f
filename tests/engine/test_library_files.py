"""A registry over files says what one over imported modules says, and imports nothing."""

from __future__ import annotations

import sys

import pytest

from patches.engine import gate
from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute
from patches.engine.library_files import LibraryFiles
from patches.engine.registry import Registry
from patches.engine.report import Report, Status
from tests.engine.conftest import patch


def from_files(*edits: tuple, **options) -> Report:
    """What a registry over files reports of patches a, b, ... with the given edits each, once they are applied."""
    files = LibraryFiles()
    patches = [patch(chr(ord("a") + i), *each, **options) for i, each in enumerate(edits)]
    return Registry(map(files.readable, patches), libraries=files).apply()


def described(report: Report) -> list[tuple]:
    return [(r.id, r.status, r.reason, r.versions, [c.target for c in r.changes]) for r in report]


HELPER = {"_patches_h": len}
CASES = {
    "a function": [(Rewrite("toy:plain", "y * 2", "y * 3"),)],
    "under a decorator": [(Rewrite("toy:wrapped", "x + 1", "x + 2"),)],
    "a static method": [(Rewrite("toy:Base.static", "a - 1", "a"),)],
    "a class method": [(Rewrite("toy:Base.made", "cls, a", "a, cls"),)],
    "a property": [(Rewrite("toy:Base.size", "return 1", "return 2"),)],
    "with super": [(Rewrite("toy:Derived.who", "'derived'", "'other'"),)],
    "a private method": [(Rewrite("toy:Derived._Derived__mangled", "return x", "return -x"),)],
    "an inner class": [(Rewrite("toy:Derived.Inner.fail", "a + b", "a - b"),)],
    "with a helper": [(Rewrite("toy:plain", "y * 2", "_patches_h(y)", names=HELPER),)],
    "two patches of a function": [(Rewrite("toy:plain", "y * 2", "y * 3"),), (Rewrite("toy:plain", "x + k", "x"),)],
    "two patches that overlap": [(Rewrite("toy:plain", "y * 2", "y * 3"),), (Rewrite("toy:plain", "y = y * 2", "y = 1"),)],
    "helpers that differ": [
        (Rewrite("toy:plain", "y * 2", "_patches_h(y)", names=HELPER),),
        (Rewrite("toy:plain", "x + k", "_patches_h(x)", names={"_patches_h": abs}),),
    ],
    "another count": [(Rewrite("toy:plain", "y", "x", count=2),)],
    "other code": [(Rewrite("toy:plain", "y * 7", "y"),)],
    "no such function": [(Rewrite("toy:absent", "y", "x"),)],
    "no such class": [(Rewrite("toy:Absent.who", "y", "x"),)],
    "no function": [(Rewrite("toy:Base", "y", "x"),)],
    "an inherited method": [(Rewrite("toy:Derived.static", "a - 1", "a"),)],
    "no such module": [(Rewrite("toy_absent:plain", "y", "x"),)],
    "a new attribute": [(SetAttribute("toy:Base.new", 5),)],
    "an attribute that exists": [(SetAttribute("toy:Base.who", 5),)],
    "one that may exist": [(SetAttribute("toy:Base.who", 5, keep=True),)],
    "one that it replaces": [(SetAttribute("toy:Base.who", make=lambda old: lambda self: old, original_contains="'base'"),)],
    "one that is other code": [(SetAttribute("toy:Base.who", make=lambda old: old, original_contains="'else'"),)],
    "one that may be missing": [(SetAttribute("toy:Base.new", 5, original_contains="1", missing_ok=True),)],
    "one to delete": [(DeleteAttribute("toy:Base.who"),)],
    "none to delete": [(DeleteAttribute("toy:Base.new"),)],
    "none that must be there": [(DeleteAttribute("toy:Base.new", missing_ok=True),)],
    "one of two does not fit": [(Rewrite("toy:plain", "y * 2", "y * 3"), Rewrite("toy:wrapped", "x + 9", "x"))],
}  # fmt: skip


@pytest.mark.parametrize("edits", CASES.values(), ids=CASES)
def test_it_says_what_a_process_says(toy, registry, edits):
    r = registry(*edits)
    live = r.apply()
    assert described(from_files(*edits)) == described(live)
    r.revert()


def test_the_cases_are_of_several_states(toy):
    states = {result.status for edits in CASES.values() for result in from_files(*edits)}
    assert states == {Status.APPLIED, Status.CONFLICT, Status.PENDING}


def test_states_and_diffs_of_a_module_that_runs_nothing(write_module):
    """Its own import would fail."""
    write_module("toy", "def f(x):\n    return x + 1\n\nclass C:\n    size = 3\n\nraise RuntimeError\n")
    edits = [
        (Rewrite("toy:f", "x + 1", "x + 2"),),
        (Rewrite("toy:f", "x + 7", "x"),),
        (SetAttribute("toy:C.size", 4),),
        (SetAttribute("toy:C.new", make=_never_called),),
    ]
    report = from_files(*edits, damage=_never_called)
    assert [r.status for r in report] == [Status.APPLIED, Status.CONFLICT, Status.SHADOWED, Status.APPLIED]
    assert "-    return x + 1\n+    return x + 2\n" in report["a"].changes[0].diff
    assert "another program has put a int at toy:C.size" in report["c"].reason
    assert "+new = <made at the import by " in report["d"].changes[0].diff
    assert "toy" not in sys.modules


def _never_called(*_):
    raise AssertionError("it needs the library")


def test_a_function_without_a_name_is_found_by_its_decorator(write_module):
    write_module(
        "toy",
        """
        def register(name):
            return lambda function: function

        @register("one")
        def _(x):
            return x + 1

        @register("two")
        def _(x):
            return x + 1
        """,
    )

    def reached(decorator: str) -> Rewrite:
        return Rewrite("toy:two", "x + 1", "x + 2", reach=_never_called, decorator=decorator)

    found, missing = reached("register('two')"), reached("register('three')")
    report = from_files((found,), (missing,))
    assert report["a"].status is Status.APPLIED and report["b"].status is Status.CONFLICT
    assert '\n @register("two")\n def _(x):\n-    return x + 1\n+    return x + 2\n' in report["a"].changes[0].diff
    assert "no function of toy has the decorator register('three')" in report["b"].reason


@pytest.mark.parametrize(
    "text, version",
    [
        ("__version__ = '2.0'", "2.0"),
        ("__version__ = '2' + str(0)", None),
        ("try:\n    __version__ = str(2)\nexcept ValueError:\n    __version__ = 'unknown'", None),
        ("", None),
    ],
    ids=["text", "computed", "either", "none"],
)
def test_the_version_is_that_of_the_module_if_its_file_has_it(write_module, text, version):
    write_module("toy", text)
    assert LibraryFiles().version("toy") == version


def test_a_version_that_metadata_do_not_have_is_used_and_noted(write_module, tmp_path):
    write_module("toy", "__version__ = '2.0'\ndef f(x):\n    return x + 1\n")
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    edit = Rewrite("toy:f", "x + 1", "x", when="toy<2")
    report = from_files((edit,), (edit._replace(when="toy>=2"),), requires=("toy",))
    assert [r.status for r in report] == [Status.CONFLICT, Status.APPLIED]
    assert (
        report["a"].versions == {"toy": "2.0"}
        and len([note for note in report.notes if "metadata says 1.0" in note]) == 1
    )
    gate._read_version.cache_clear()


def test_a_file_that_this_python_cannot_read_is_not_there(write_module):
    write_module("toy", "def f(:\n")
    (result,) = from_files((Rewrite("toy:f", "x", "y"),))
    assert result.status is Status.PENDING


def test_submodules_of_a_package(write_module):
    write_module("toys.__init__", "raise RuntimeError\n")
    write_module("toys.one", "def f(x):\n    return x + 1\n")
    (result,) = from_files((Rewrite("toys.one:f", "x + 1", "x"),))
    assert result.status is Status.APPLIED and "toys" not in sys.modules
