"""The state is read from what is installed and imported, not from what was said or done before."""

from __future__ import annotations

import importlib
import sys

import pytest

from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute
from patches.engine.report import Status

BODY = "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self):\n        return 1\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay the metadata of a release beside the modules of ``write_module``; returns where they are."""

    def lay(name: str, version: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return lay


# -- packages and their versions --------------------------------------------------------------------


def test_a_package_without_metadata_is_known_once_it_is_imported(write_module, registry):
    """A frozen application, a vendored copy: only the module knows its version, and not before the end."""
    write_module("bare.__init__", f"{BODY}\n__version__ = '1.5'\n")
    r = registry((Rewrite("bare:f", "x + 1", "x + 2"),), requires=("bare>=1,<2",))
    assert r.apply()["a"].status is Status.NOT_INSTALLED
    import bare

    assert bare.f(1) == 3
    assert r.report()["a"].status is Status.APPLIED and r.report()["a"].versions == {"bare": "1.5"}


def test_the_module_counts_where_its_metadata_say_something_else(write_module, registry, install):
    write_module("liar.__init__", f"{BODY}\n__version__ = '1.0'\n")
    install("liar", "2.0")
    r = registry((Rewrite("liar:f", "x + 1", "x + 2"),), requires=("liar<2",), tested_up_to="9")
    assert r.apply()["a"].status is Status.NOT_AFFECTED, "all that is known before the import"
    import liar

    report = r.report()
    assert liar.f(1) == 3 and report["a"].status is Status.APPLIED
    assert report.notes == (
        "liar: the imported module is version 1.0, its metadata says 2.0; the version of the module is used",
    )


def test_a_package_that_is_installed_meanwhile_is_seen(write_module, registry, install):
    r = registry((Rewrite("young:f", "x + 1", "x + 2"),), requires=("young",))
    assert r.apply()["a"].status is Status.NOT_INSTALLED
    write_module("young", BODY)
    install("young", "1.0")
    importlib.invalidate_caches()
    import young

    assert young.f(1) == 3 and r.report()["a"].status is Status.APPLIED


# -- modules that are loaded anew -------------------------------------------------------------------


def test_a_reloaded_module_is_seen_patched_again_and_reverted(write_module, registry):
    write_module("again", BODY)
    import again

    old_f, old_a, code = again.f, again.A, again.f.__code__
    r = registry(
        (
            Rewrite("again:f", "x + 1", "_patches_two(x)", names={"_patches_two": lambda x: x + 2}),
            SetAttribute("again:A.h", 5),
        )
    )
    r.apply(strict=True)
    importlib.reload(again)
    result = r.report()["a"]
    assert result.status is Status.AVAILABLE and "was reloaded" in result.reason and "apply()" in result.reason
    assert again.f(1) == 2 and not hasattr(again.A, "h"), "so it is"
    assert r.apply(strict=True)["a"].status is Status.APPLIED
    assert again.f(1) == 3 and again.A.h == 5 and old_f(1) == 3, "those who hold the old function too"
    r.revert()
    assert again.f(1) == 2 and old_f.__code__ == code and not hasattr(again.A, "h") and not hasattr(old_a, "h")
    assert "_patches_two" not in vars(again)


# -- what someone set before us ---------------------------------------------------------------------


def theirs(self):
    """Of this module, not of the toy."""


@pytest.mark.parametrize(
    "edit",
    [
        SetAttribute("toy:Base.who", original_contains="'base'", make=lambda old: lambda self: old(self)),
        SetAttribute("toy:Base.who", value=lambda self: "ours", keep=True),
        SetAttribute("toy:Base.who", value=lambda self: "ours"),
        DeleteAttribute("toy:Base.who"),
        Rewrite("toy:Base.who", "'base'", "'ours'"),
    ],
    ids=["over", "keep", "set", "delete", "rewrite"],
)
def test_what_someone_else_set_before_us_stays_and_is_named(toy, registry, edit):
    toy.Base.who = theirs
    result = registry((edit,)).apply()["a"]
    assert result.status is Status.SHADOWED and __name__ in result.reason and "left as it is" in result.reason
    assert vars(toy.Base)["who"] is theirs


def test_a_new_attribute_that_someone_else_set_before_us_stays(toy, registry):
    toy.Base.new = 1
    result = registry((SetAttribute("toy:Base.new", 2),)).apply()["a"]
    assert result.status is Status.SHADOWED and "toy:Base.new" in result.reason and toy.Base.new == 1


def test_a_name_that_someone_else_put_into_the_module_stays(toy, registry):
    toy._patches_k = "theirs"
    r = registry((Rewrite("toy:plain", "y * 2", "_patches_k", names={"_patches_k": "ours"}),))
    assert r.apply()["a"].status is Status.SHADOWED
    assert toy._patches_k == "theirs" and toy.plain(5) == 12


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (SetAttribute("toy:Base.who", value=1), "already exists in the package"),
        (SetAttribute("toy:Base.who", value=1, original_contains="'other'"), "'other'\" does not occur in it"),
        (SetAttribute("toy:Base.nothing", value=1, original_contains="'base'"), "there is no such function"),
        (DeleteAttribute("toy:Base.nothing"), "cannot be deleted"),
    ],
)
def test_an_original_other_than_the_one_expected_is_a_conflict(toy, registry, edit, why):
    result = registry((edit,)).apply()["a"]
    assert result.status is Status.CONFLICT and why in result.reason


def test_what_the_package_has_itself_stays_where_the_edit_says_so(toy, registry):
    before = vars(toy.Base)["who"]
    r = registry((SetAttribute("toy:Base.who", value=1, keep=True), Rewrite("toy:plain", "y * 2", "y * 3")))
    assert r.apply(strict=True)["a"].status is Status.APPLIED
    assert vars(toy.Base)["who"] is before and toy.plain(5) == 18


def test_an_original_that_some_releases_lack(toy, registry):
    r = registry(
        (
            SetAttribute(
                "toy:Base.extra", make=lambda old: old or (lambda self: 1), original_contains="x", missing_ok=True
            ),
        )
    )
    r.apply(strict=True)
    assert toy.Base().extra() == 1


def test_names_that_differ_are_a_conflict_and_the_same_one_is_shared(toy, registry):
    def rewrite(find, value):
        return Rewrite("toy:plain", find, f"({find}, _patches_n)[0]", names={"_patches_n": value})

    shared = object()
    r = registry((rewrite("y * 2", shared),), (rewrite("y > 3", shared),), (rewrite("x + k", object()),))
    states = {result.id: result.status for result in r.apply()}
    assert states == {"a": Status.APPLIED, "b": Status.APPLIED, "c": Status.CONFLICT}
    r.revert("a")
    assert toy._patches_n is shared
    r.revert("b")
    assert not hasattr(toy, "_patches_n")


# -- features: edits that are in while someone uses them --------------------------------------------


class Holder:
    pass


def test_a_feature_is_in_while_it_is_held_shown_and_taken_out_by_revert(toy, registry):
    from patches.engine.patch import Feature

    feature = Feature("toy-feature", "shows itself", (Rewrite("toy:plain", "y * 2", "y * 3"),))
    r = registry((Rewrite("toy:plain", "y > 3", "y > 4"),))
    r.apply()
    one, two = Holder(), Holder()
    r.hold(feature, one), r.hold(feature, two)
    shown = r.report().features[0]
    assert (shown.id, shown.status) == ("toy-feature", Status.APPLIED) and shown.changes[0].diff
    assert "toy-feature" in str(r.report()) and toy.plain(5) == 18
    r.release(feature, one)
    assert toy.plain(5) == 18, "the other holds it"
    r.release(feature, two)
    assert toy.plain(5) == 12 and r.report().features == ()
    r.hold(feature, one)
    r.revert()
    assert toy.plain(5) == 12 and r.report().features == ()
    assert r.release(feature, one) == []


def test_a_holder_that_is_gone_without_a_word_holds_no_more(toy, registry):
    from patches.engine.patch import Feature

    feature = Feature("toy-feature", "shows itself", (Rewrite("toy:plain", "y * 2", "y * 3"),))
    r = registry((Rewrite("toy:wrapped", "x + 1", "x + 2"),))
    holder = Holder()
    r.hold(feature, holder)
    del holder
    r.apply()
    assert toy.plain(5) == 12


# -- nothing raises into an import ------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("where", ["callback", "compiler", "damage"])
def test_nothing_of_ours_raises_into_an_import(write_module, where, error):
    from patches.engine.registry import Registry
    from tests.engine.conftest import patch

    def fails(*_):
        raise error("no")

    name = f"calm_{where}_{error.__name__}"
    write_module(name, BODY)
    one = patch("a", Rewrite(f"{name}:f", "x + 1", "x + 2"), damage=fails if where == "damage" else None)
    r = Registry([one], fails if where == "compiler" else lambda: "")
    r.on_change = fails if where == "callback" else None
    r.apply()
    module = importlib.import_module(name)
    assert module.f(1) == 3
    report = r.report()
    assert report["a"].status is Status.APPLIED
    assert error.__name__ in " ".join((*report.notes, *report["a"].notes)), "and it is told"
    r.revert()
    assert module.f(1) == 2


def test_an_interrupt_passes_through_an_import_and_the_next_call_catches_up(write_module, registry):
    write_module("stopped", BODY)
    r = registry((Rewrite("stopped:f", "x + 1", "x + 2"),))
    r.apply()

    def interrupt(_report):
        raise KeyboardInterrupt

    r.on_change = interrupt
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("stopped")
    r.on_change = None
    module = importlib.import_module("stopped")
    r.apply()
    assert module.f(1) == 3
    assert sys.modules["stopped"] is module
