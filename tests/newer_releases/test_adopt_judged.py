"""What `adopt` makes of answers: which patch is to blame, and what is remembered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest

from patches import adoption
from patches.adoption import CANNOT_SHOW, DOES_NOT_FIT, HELD, NOT_NEEDED, WRONG, Adoption, Row, trial
from patches.engine.gate import Verdict
from patches.engine.report import Status
from patches.newer_releases import adopted
from patches.verification import asking

A, B, C = "peft-dora-cache", "bitsandbytes-int8-copies", "accelerate-left-on-device"
IDS = (A, B, C)
ENTRY = "0123456789abcdef0123456789abcdef"


class Stand:
    """Answers in the place of processes; by default all is well."""

    def __init__(self) -> None:
        self.reproducer: Callable[[str, str, set[str]], tuple] = lambda patch_id, phase, trial: (
            phase in ("unpatched", "reverted"),
            "figure",
        )
        self.program: Callable[[str, str, set[str]], tuple] = lambda name, applied, on_trial: (True, "digest")
        self.asked: list[tuple] = []

    def __call__(self, function, questions, *_: object) -> Iterator[tuple[int, tuple]]:
        for index, question in reversed(list(enumerate(questions))):  # in any order
            self.asked.append(question)
            on_trial = set(question[-1].split(trial.SEPARATOR))
            if function == trial.REPRODUCER:
                patch_id, _, phase, _ = question
                yield index, self.reproducer(patch_id, phase, on_trial)
            else:
                yield index, self.program(question[0], question[1], on_trial)


@pytest.fixture
def stand(monkeypatch, tmp_path) -> Stand:
    """Three patches are left out here, of two healthy programs."""
    found = Stand()
    monkeypatch.setenv(adopted.VARIABLE, str(tmp_path / "own.json"))
    monkeypatch.setattr(asking, "ask_processes", found)
    monkeypatch.setattr(adoption, "PROGRAMS", {"one": None, "two": None})
    verdict = Verdict(Status.UNTESTED, "newer", {"torch": "9"})
    monkeypatch.setattr(adoption.REGISTRY, "verdict", lambda part, **_: verdict, raising=False)
    monkeypatch.setattr(
        adoption.NEWER_RELEASES, "entry", lambda part, day: adopted.Entry(part.key, {}, ENTRY, day), raising=False
    )
    return found


def first(found: Adoption) -> Row:
    """What was said of ``A``."""
    return next(row for row in found.rows if row.id == A)


def verdicts(found: Adoption) -> dict[str, str]:
    return {row.id: row.verdict for row in found.rows}


def remembered() -> set[str]:
    return (
        {entry.patch for entry in adopted.read_entries(adopted.adopted_file())}
        if adopted.adopted_file().exists()
        else set()
    )


def test_all_hold(stand):
    found = adoption.adopt(*IDS)
    assert verdicts(found) == dict.fromkeys(IDS, HELD) and found.ok and found.programs == 2
    assert remembered() == set(IDS)
    assert "from now on they are applied on this stack" in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("unpatched", "patched", "expected", "words"),
    [
        ((True, "f"), (False, "f"), HELD, ""),
        ((False, "f"), (False, "f"), NOT_NEEDED, "the defect is not there: f"),
        ((False, ""), (None, "ERROR"), NOT_NEEDED, "the defect is not there"),
        ((None, "cannot show: no GPU here"), (False, ""), CANNOT_SHOW, "no GPU here"),
        ((None, "TypeError: x"), (False, ""), CANNOT_SHOW, "its reproducer fails: TypeError: x"),
        ((True, "f"), (None, "conflict: x is not there"), DOES_NOT_FIT, "x is not there"),
        ((True, "f"), (None, "failed: x"), WRONG, "with the patch: failed: x"),
        ((True, "f"), (None, "TypeError: x"), WRONG, "with the patch: TypeError: x"),
        ((True, "f"), (True, ""), WRONG, "with the patch: the defect is still there"),
    ],
)  # fmt: skip
def test_a_reproducer_decides_first(stand, unpatched, patched, expected, words):
    alone = {"unpatched": unpatched, "patched": patched, "all": (False, ""), "reverted": (True, "")}
    well = stand.reproducer
    stand.reproducer = lambda patch_id, phase, on_trial: (
        alone[phase] if patch_id == A else well(patch_id, phase, on_trial)
    )
    found = adoption.adopt(*IDS)
    assert verdicts(found) == {A: expected, B: HELD, C: HELD}
    assert first(found).reason == words
    assert found.ok is (expected in (HELD, NOT_NEEDED, CANNOT_SHOW))
    assert remembered() == {each for each, verdict in verdicts(found).items() if verdict == HELD}
    tried = [question for question in stand.asked if len(question) == 4 and question[2] in ("all", "reverted")]
    assert {question[0] for question in tried} == {B, C} | ({A} if expected == HELD else set())


@pytest.mark.parametrize(
    ("phase", "answer", "words"),
    [
        ("all", (True, ""), "with all patches: the defect is there"),
        ("all", (None, "TypeError"), "with all patches: TypeError"),
        ("reverted", (False, ""), "after revert: the defect is gone"),
    ],
)
def test_what_holds_alone_and_not_with_all_is_wrong(stand, phase, answer, words):
    well = stand.reproducer
    stand.reproducer = lambda patch_id, at, on_trial: (
        answer if (patch_id, at) == (A, phase) else well(patch_id, at, on_trial)
    )
    found = adoption.adopt(*IDS)
    assert (first(found).verdict, first(found).reason) == (WRONG, words)
    assert remembered() == {B, C} and not found.ok


def test_the_patch_that_changes_a_program_alone_is_to_blame(stand):
    stand.program = lambda name, applied, on_trial: (True, "other" if applied in ("", A) and A in on_trial else "same")
    found = adoption.adopt(*IDS)
    assert verdicts(found) == {A: WRONG, B: HELD, C: HELD}
    assert first(found).reason == "a program that was right, 'one': its result changes"
    assert remembered() == {B, C}


def test_a_program_that_fails_says_with_what(stand):
    bad = (None, "TypeError: no")
    stand.program = lambda name, applied, on_trial: (
        bad if (name, applied) in (("two", ""), ("two", A)) else (True, "same")
    )
    well = adoption.adopt(A).rows[0]
    assert (well.verdict, well.reason) == (WRONG, "a program that was right, 'two': fails: TypeError: no")


def test_where_only_several_together_change_a_program_none_of_them_is_adopted(stand):
    stand.program = lambda name, applied, on_trial: (True, "other" if not applied and {A, B} <= on_trial else "same")
    found = adoption.adopt(*IDS)
    assert verdicts(found) == dict.fromkeys(IDS, WRONG) and not remembered()
    assert "together with others" in first(found).reason


def test_what_is_left_after_a_blame_is_judged_again(stand):
    """One changes the program alone; two others do so together, which is seen only without the first."""

    def program(name: str, applied: str, on_trial: set[str]) -> tuple:
        if applied == A or (not applied and A in on_trial):
            return True, "other"
        return True, "third" if not applied and {B, C} <= on_trial else "same"

    stand.program = program
    found = adoption.adopt(*IDS)
    assert verdicts(found) == dict.fromkeys(IDS, WRONG) and not remembered()


def test_a_program_that_does_not_run_here_has_nothing_to_say(stand):
    stand.program = lambda name, applied, on_trial: (None, f"fails with {applied}") if name == "one" else (True, "same")
    found = adoption.adopt(*IDS)
    assert verdicts(found) == dict.fromkeys(IDS, HELD) and found.programs == 1


def test_what_other_patches_change_is_said_and_is_not_ok(stand):
    stand.program = lambda name, applied, on_trial: (True, "same" if applied == trial.UNPATCHED else "known")
    found = adoption.adopt(*IDS)
    assert found.harmed == {"one": "its result changes", "two": "its result changes"} and not found.ok
    assert "note: one: its result changes" in str(found)


def test_a_file_that_cannot_be_written_is_said_with_what_to_do(stand, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    file = tmp_path / "taken" / "own.json"
    monkeypatch.setenv(adopted.VARIABLE, str(file))
    found = adoption.adopt(*IDS)
    assert found.problem.startswith(f"{file} cannot be written (") and not found.ok
    assert "PATCHES_ADOPTED=FILE python -m patches adopt" in found.problem
    assert "not remembered: " in str(found) and "remembered in" not in str(found)


@pytest.mark.skipif(os.name != "posix", reason="there is always a home folder")
def test_without_a_home_it_is_said_that_there_is_no_place(stand, monkeypatch):
    def nowhere() -> None:
        raise adopted.Nowhere("there is no home folder")

    monkeypatch.setattr(adopted, "adopted_file", nowhere)
    found = adoption.adopt(*IDS)
    assert not found.ok and found.problem.startswith("there is no home folder; name a file that can be written: ")


def test_what_has_no_source_cannot_be_remembered(stand, monkeypatch):
    monkeypatch.setattr(adoption.NEWER_RELEASES, "entry", lambda part, day: None, raising=False)
    found = adoption.adopt(A)
    assert found.problem == f"{A}: the source cannot be read" and not found.ok and not remembered()


def test_the_table_has_what_needs_attention_last_and_json_has_all():
    rows = (Row("a", "", WRONG, "why"), Row("b", "part", HELD, ""), Row("c", "", NOT_NEEDED, "gone"))
    found = Adoption(rows, 2, {}, "FILE")
    text = str(found)
    assert text.index("held") < text.index("not needed") < text.index("wrong")
    assert "b: part" in text and "3 patches: 1 held, 1 not needed, 1 wrong" in text
    assert "remembered in FILE: from now on it is applied on this stack" in " ".join(text.split())
    said = json.loads(found.to_json())
    assert said["ok"] is False and said["rows"][1] == {"id": "b", "part": "part", "verdict": HELD, "reason": ""}
    assert set(said) == {"ok", "rows", "programs", "harmed", "file", "problem"}


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_processes_at_a_time_is_an_error(jobs):
    with pytest.raises(ValueError, match=f"1 or more, not {jobs}"):
        adoption.adopt(jobs=jobs)
