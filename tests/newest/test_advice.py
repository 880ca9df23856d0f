"""`make newest` says in words what a release that nobody has tried means for a patch that does not hold on it."""

from __future__ import annotations

import pytest

from patches import REGISTRY
from patches.verification import PHASES, Row
from tools.newest.advice import advice, describe, holds, summary

ID = "peft-dora-cache"
PART = REGISTRY.patches[ID].parts[0]
HOLDS = [(True, "crash"), (False, "equal"), (False, "equal"), (True, "crash")]


def row(verdict: str, *findings: tuple[bool | None, str], reason: str = "") -> Row:
    return Row(ID, verdict, reason, dict(zip(PHASES, findings)))


@pytest.mark.parametrize(
    ("unpatched", "patched", "state", "words"),
    [
        ((True, "crash"), (None, "conflict: no match"), "conflict", "Write an edit for the new source"),
        ((False, "equal"), (None, "conflict: no match"), "repaired upstream", "the defect is gone (equal): end the range"),
        ((False, "equal"), (False, "equal"), "repaired upstream", "end the range in `requires` before this release"),
        ((True, "crash"), (True, "crash"), "wrong", "it goes in, and its reproducer contradicts it"),
        ((True, "crash"), (None, "failed: TypeError"), "failed", f"applying it raised, and all of it was undone. See `python -m patches diff {ID}`"),
        ((None, "ImportError"), (None, "ImportError"), "breaks off", "breaks off without the patch (ImportError): adapt `defect()`"),
    ],
)  # fmt: skip
def test_on_a_newer_release_of_its_package(unpatched, patched, state, words):
    said = advice(row("wrong", unpatched, patched), PART, newer=True)
    assert said is not None and said.state == state
    assert words in said.to_do


@pytest.mark.parametrize(
    ("findings", "state", "words"),
    [
        ([(True, "crash"), (True, "crash")], "wrong", "it goes in, and its reproducer contradicts it"),
        ([(False, "equal"), (False, "equal")], "wrong", "finds nothing without the patch, on a release of peft that has the defect"),
        ([(None, "TypeError"), (None, "TypeError")], "wrong", "breaks off"),
        ([(True, "crash"), (None, "conflict: no match")], "conflict", "Write an edit for the new source"),
        ([(True, "crash")], "outside of its range", "outside of the range in `requires`"),
    ],
)  # fmt: skip
def test_on_a_release_that_it_was_tested_on(findings, state, words):
    said = advice(row("wrong", *findings), PART, newer=False)
    assert said is not None and said.state == state
    assert words in said.to_do


def test_a_defect_that_this_host_cannot_show_is_told_of_newer_releases_only():
    unseen = row("cannot show", reason="needs AVX512-BF16")
    said = advice(unseen, PART, newer=True)
    assert said is not None and f"(needs AVX512-BF16): run `python -m patches verify {ID}`" in said.to_do
    assert advice(unseen, PART, newer=False) is None


def test_a_patch_that_holds_needs_no_advice():
    held = row("ok", *HOLDS)
    assert holds(held) and advice(held, PART, newer=True) is None


@pytest.mark.parametrize(
    "other", [row("ok", (False, "equal")), row("wrong", *HOLDS), row("cannot show"), row("skipped")]
)
def test_nothing_less_than_all_four_runs_holds(other):
    assert not holds(other)


def test_the_words_name_the_patch_the_releases_and_where_to_look():
    wrong = row("wrong", (True, "crash"), *[(None, "conflict: no match")] * 3)
    said = advice(wrong, PART, newer=True)
    assert said is not None
    text = describe(wrong, PART, said)
    assert text.startswith(f"{ID}: CONFLICT on peft ")
    assert "found:   unpatched: crash; patched, all, reverted: conflict: no match\n" in text
    assert all(f"see:     {link}" in text for link in REGISTRY.patches[ID].links)


def test_the_summary_counts_what_every_reproducer_said():
    rows = [row("ok", *HOLDS), row("ok", *HOLDS), row("wrong", (True, "crash"))]
    assert summary(rows, 1).endswith("3 reproducers: 2 ok, 1 wrong. 1 to look at.")
    assert summary(rows[:2], 0).endswith("2 reproducers: 2 ok. Nothing to do.")
