"""Ids that patches had in earlier releases, and patches of several parts."""

from __future__ import annotations

import pytest

from patches.engine.edits import Rewrite
from patches.engine.patch import Finding, Part, Patch
from patches.engine.registry import Registry
from patches.engine.report import Status
from tests.engine.conftest import patch


def test_a_former_id_is_accepted_and_told_once(toy):
    r = Registry([patch("now", Rewrite("toy:plain", "y * 2", "y * 3"), former_ids=("before", "beside"))])
    assert r.apply("before")["before"].status is Status.APPLIED and toy.plain(5) == 18
    r.apply("before"), r.revert("beside")
    report = r.report("now")
    assert report["now"] is report["before"] and report.to_dict()["results"][0]["former_ids"] == ["before", "beside"]
    assert [note for note in report.notes if "before" in note] == [
        "the patch before is called now now; both ids are accepted"
    ]
    with pytest.raises(ValueError, match="two patches are named before"):
        Registry([*r.patches.values(), patch("before", Rewrite("toy:plain", "y * 2", "y * 4"))])


def part(name: str, *edits: Rewrite, requires: tuple[str, ...] = ("early",)) -> Part:
    return Part(name, requires, "999", edits, lambda: Finding(True))


@pytest.fixture
def parted(write_module) -> Registry:
    """One patch of the modules ``early`` and ``late``, which are imported one after the other."""
    write_module("early", "__version__ = '1'\ndef f(): return 1\n")
    write_module("late", "__version__ = '1'\ndef f(): return 1\n")
    parts = (part("first", Rewrite("early:f", "1", "2")), part("second", Rewrite("late:f", "1", "2")))
    return Registry([Patch("a", "summary", (), parts=parts)])


def test_each_part_waits_for_its_own_modules(parted):
    told = []
    parted.on_change = told.append
    import early

    parted.follow_imports()
    assert early.f() == 2 and parted.report()["a"].status is Status.APPLIED
    assert [change.target for change in parted.report()["a"].changes] == ["early:f"]
    import late

    assert late.f() == 2 and [change.target for change in parted.report()["a"].changes] == ["early:f", "late:f"]
    assert [[result.id for result in report] for report in told] == [["a"], ["a"]], "once for each part"
    parted.revert("a")
    assert (early.f(), late.f()) == (1, 1) and parted.report()["a"].status is Status.REVERTED


def test_reverted_before_the_second_part_is_imported(parted):
    import early

    parted.apply()
    parted.revert()
    import late

    assert (early.f(), late.f()) == (1, 1)


def test_a_part_that_does_not_fit_is_a_conflict_that_names_it_and_the_other_stays_repaired(parted, write_module):
    write_module("late", "__version__ = '1'\ndef f(): return 7\n")
    import early
    import late

    result = parted.apply()["a"]
    assert result.status is Status.CONFLICT and "late:f" in result.reason
    assert (early.f(), late.f()) == (2, 7)
    parted.revert()
    assert early.f() == 1


def test_a_patch_for_one_of_two_releases_is_applied_and_one_for_none_is_not(toy):
    edit = Rewrite("toy:plain", "y * 2", "y * 3")
    old, new = (part(name, edit, requires=(f"packaging{which}",)) for name, which in (("old", "<1"), ("new", ">=1")))
    r = Registry([Patch("a", "summary", (), parts=(old, new)), Patch("b", "summary", (), parts=(old,))])
    report = r.apply()
    assert [report[name].status for name in ("a", "b")] == [Status.APPLIED, Status.NOT_AFFECTED]
    assert toy.plain(5) == 18


def test_a_disabled_patch_is_disabled_with_all_its_parts(parted):
    import early

    parted.disabled = frozenset({"a"})
    assert parted.apply()["a"].status is Status.DISABLED and early.f() == 1
