"""Modules that are imported later, already, or half way through their own import."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys

from patches.engine import gate, imports as hooks
from patches.engine.edits import Rewrite
from patches.engine.report import Status

BODY = "def f(x):\n    return x + 1\n"


def test_apply_before_the_import(write_module, registry):
    write_module("later", BODY)
    r = registry((Rewrite("later:f", "x + 1", "x + 2"),))
    result = r.apply()["a"]
    assert result.status is Status.PENDING and "later is not imported yet" in result.reason
    assert "later" not in sys.modules
    import later

    assert later.f(1) == 3
    assert r.report()["a"].status is Status.APPLIED


def test_a_patch_waits_for_the_last_of_its_modules(write_module, registry):
    write_module("one", BODY), write_module("two", BODY)
    r = registry((Rewrite("one:f", "x + 1", "x + 2"), Rewrite("two:f", "x + 1", "x + 3")))
    r.apply()
    import one

    assert one.f(1) == 2, "all or nothing"
    import two

    assert (one.f(1), two.f(1)) == (3, 4)


def test_what_arrives_while_another_goes_in_is_not_missed(write_module, registry):
    """Applying one patch imports the module that another waits for, after that other was looked at."""
    write_module("early", BODY), write_module("meanwhile", BODY)
    import early

    def damage():
        import meanwhile  # noqa: F401

        return ()

    r = registry((Rewrite("early:f", "x + 1", "x + 2"),), (Rewrite("meanwhile:f", "x + 1", "x + 3"),), damage=damage)
    report = r.apply()
    assert {result.status for result in report} == {Status.APPLIED}
    import meanwhile

    assert (early.f(1), meanwhile.f(1)) == (3, 4)


def test_a_patch_waits_for_the_package_that_it_repairs(write_module, registry):
    """An edit in torch for a defect of another package: without that one there is nothing to repair."""
    write_module("below", BODY), write_module("above", "__version__ = '1.0'\n")
    import below

    r = registry((Rewrite("below:f", "x + 1", "x + 2"),), requires=("above",))
    r.apply()
    assert below.f(1) == 2
    import above  # noqa: F401

    assert below.f(1) == 3 and r.report()["a"].status is Status.APPLIED


def test_reverted_before_the_import_it_stays_out(write_module, registry):
    write_module("later2", BODY)
    r = registry((Rewrite("later2:f", "x + 1", "x + 2"),))
    r.apply()
    r.revert()
    import later2

    assert later2.f(1) == 2


def test_a_half_imported_package_is_patched_when_its_import_is_over(write_module, registry):
    """As bitsandbytes calls its entry points: from inside its own import, its submodules loaded."""
    r = registry((Rewrite("half.sub:f", "x + 1", "x + 2"),))
    seen = sys.modules["_half_probe"] = type(sys)("_half_probe")
    seen.apply = lambda: seen.states.append(r.apply()["a"].status)
    seen.states = []
    write_module("half.sub", BODY)
    write_module("half.__init__", "import _half_probe\nfrom . import sub\n_half_probe.apply()\nlate = 1\n")
    try:
        import half
    finally:
        del sys.modules["_half_probe"]
    assert seen.states == [Status.PENDING]
    assert half.sub.f(1) == 3
    assert type(half.__spec__).__name__ == "ModuleSpec", "the watch is taken down"


def test_a_failing_import_is_not_disturbed_and_may_be_tried_again(write_module, registry):
    r = registry((Rewrite("broken:f", "x + 1", "x + 2"),))
    write_module("broken", BODY + "raise ImportError('not today')\n")
    r.apply()
    for _ in range(2):
        try:
            importlib.import_module("broken")
        except ImportError as error:
            assert str(error) == "not today"
        else:
            raise AssertionError("the import should fail")
    assert r.report()["a"].status is Status.PENDING


def test_imported(write_module):
    write_module("plain_module", "x = 1")
    assert not hooks.imported("plain_module")
    importlib.import_module("plain_module")
    assert hooks.imported("plain_module")


def test_damage_is_looked_for_only_where_something_can_be_alive(write_module, registry, tmp_path):
    metadata = tmp_path / "newborn-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: newborn\nVersion: 1.0\n")
    write_module("newborn", BODY)
    r = registry((Rewrite("newborn:f", "x + 1", "x + 2"),), requires=("newborn",), damage=lambda: ("damaged",))
    r.apply()
    import newborn

    assert newborn.f(1) == 3 and r.report()["a"].notes == (), "its import had just ended"
    r.revert()
    assert r.apply()["a"].notes == ("damaged",)


def test_nobody_asks_for_the_release_of_what_is_not_imported(write_module, registry, monkeypatch):
    asked = []
    monkeypatch.setattr(gate, "_metadata_version", asked.append)
    write_module("unborn", BODY + "__version__ = '1.0'\n")
    r = registry((Rewrite("unborn:f", "x + 1", "x + 2"),), requires=("unborn>=1",))
    told = []
    r.on_change = told.append
    r.follow_imports()
    assert not asked and not told
    assert importlib.import_module("unborn").f(1) == 3
    assert [result.status for result in told[0]] == [Status.APPLIED]
    r.revert()


def test_a_second_copy_of_the_module_as_the_shim_has_one_sees_what_the_first_put_on_a_spec(write_module):
    """Both wait for a module, and both are told; nothing of either stays on its spec or in the finders."""
    spec = importlib.util.spec_from_file_location("second_imports", hooks.__file__)
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    write_module("watched_by_two", BODY)
    told = []
    second.after_import("watched_by_two", lambda: told.append("second"))
    hooks.after_import("watched_by_two", lambda: told.append("first"))
    import watched_by_two

    assert sorted(told) == ["first", "second"]
    assert type(watched_by_two.__spec__) is importlib.machinery.ModuleSpec
    second.after_import("never_imported", told.clear)
    second.stop()
    assert not second._awaited and not any(isinstance(finder, second._Finder) for finder in sys.meta_path)
    assert any(isinstance(finder, hooks._Finder) for finder in sys.meta_path), "that of the other stays"
