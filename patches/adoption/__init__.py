"""``python -m patches adopt``: verify on this machine the patches that are left out on a newer release; apply those that hold.

First the reproducers: the defect must be there without the patch, gone with it alone and with all, and back after revert.
Then programs of ordinary users on healthy paths, whose results must be the same to the bit.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import table
from ..engine.ids import patch_id_of
from ..engine.patch import Part
from ..engine.report import Status
from ..newer_releases import adopted
from ..process_registry import NEWER_RELEASES, REGISTRY
from ..verification import CANNOT, modules_to_preload
from ..verification.asking import Asking
from ..verification.processes import number_of_jobs
from ..verification.worker import Answer
from . import trial
from .healthy_programs import PROGRAMS

HELD, NOT_NEEDED, CANNOT_SHOW, DOES_NOT_FIT, WRONG = "held", "not needed", "cannot show", "does not fit", "wrong"
VERDICTS = (HELD, NOT_NEEDED, CANNOT_SHOW, DOES_NOT_FIT, WRONG)
"""In the order in which a table shows them: what needs attention comes last."""
_PROGRAM_PACKAGES = ("torch", "bitsandbytes", "transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Row:
    """A patch, or a part of one, that is not applied here by itself, and what came of trying it.

    ``verdict`` is ``"held"``; ``"not needed"`` where the release does not have the defect any more; ``"cannot show"`` where
    the reproducer does not run here; ``"does not fit"`` where the source has changed too much; or ``"wrong"``.
    """

    id: str
    part: str
    verdict: str
    reason: str

    @property
    def name(self) -> str:
        """The id, with the part if there are several."""
        return f"{self.id}: {self.part}" if self.part else self.id

    @property
    def loud(self) -> bool:
        """Whether the defect is there and is not repaired, or something else is wrong."""
        return self.verdict in (DOES_NOT_FIT, WRONG)


@dataclass(frozen=True)
class Adoption:
    """What :func:`adopt` found. ``str()`` is a table."""

    rows: tuple[Row, ...]
    programs: int
    """The number of programs that were run with what held."""
    harmed: Mapping[str, str]
    """By program what the patches changed in it, apart from those on trial."""
    file: str
    """Where what held is remembered."""
    problem: str = ""
    """Why it could not be remembered."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and all that held is remembered."""
        return not (self.harmed or self.problem or any(row.loud for row in self.rows))

    def held(self) -> list[str]:
        """Return the names of what held."""
        return [row.name for row in self.rows if row.verdict == HELD]

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok`` and the fields by their names."""
        return {"ok": self.ok, **asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON, as ``python -m patches adopt --json`` prints it."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing to adopt: no patch is held back by a release that is newer than the tested ones"
        ordered = sorted(self.rows, key=lambda row: VERDICTS.index(row.verdict))
        lines = [table.Row((row.verdict, row.name), [row.reason] if row.reason else [], row.loud) for row in ordered]
        text = table.text(lines, table.total([row.verdict for row in self.rows], VERDICTS))
        return "\n".join([text, *map(table.wrapped, self._ending())])

    def _ending(self) -> Iterator[str]:
        held = len(self.held())
        for program, what in self.harmed.items():
            yield f"note: {program}: {what}"
        if held and not self.harmed:
            yield f"{self.programs} programs of ordinary users give the same results to the bit with them"
        if self.problem:
            yield f"not remembered: {self.problem}"
        elif held:
            yield f"remembered in {self.file}: from now on {'it is' if held == 1 else 'they are'} applied on this stack"


def adopt(*ids: str, jobs: int | None = None, progress: bool = False) -> Adoption:
    """Try the named patches, or all, that are left out because a release is newer than any that they were tested on.

    Raises what :func:`patches.verify` raises.
    """
    jobs = number_of_jobs(jobs)
    parts = {part.key: part for patch in REGISTRY.ids.choose(ids) for part in patch.parts}
    verdicts = {key: REGISTRY.verdict(part) for key, part in parts.items()}
    left_out = {key: part for key, part in parts.items() if verdicts[key].status is Status.UNTESTED}
    modules = modules_to_preload([(part, verdicts[key]) for key, part in left_out.items()])
    ask = Asking(list(dict.fromkeys([*modules, *_PROGRAM_PACKAGES])), jobs, progress)
    said = _try_alone(left_out, ask) if left_out else {}
    _try_together(left_out, said, ask)
    programs, harmed = _run_programs(left_out, said, ask)
    rows = tuple(Row(patch_id_of(key), left_out[key].name, *said[key]) for key in left_out)
    held = [left_out[key] for key in left_out if said[key][0] == HELD]
    file, problem = _remember(held)
    return Adoption(rows, programs, harmed, file, problem)


_Said = dict[str, tuple[str, str]]
"""By the key of a part the verdict and its reason."""


def _try_alone(parts: Mapping[str, Part], ask: Asking) -> _Said:
    phases = ("unpatched", "patched")
    questions = [(patch_id_of(key), part.name, phase, key) for key, part in parts.items() for phase in phases]
    answers = ask(trial.REPRODUCER, questions, "reproducers")
    return {key: _judged(*answers[2 * at : 2 * at + 2]) for at, key in enumerate(parts)}


def _judged(unpatched: Answer, patched: Answer) -> tuple[str, str]:
    """Return the verdict on a patch from its reproducer without it and with it alone."""
    present, figure = unpatched
    if present is None:
        why = figure.removeprefix(CANNOT) if figure.startswith(CANNOT) else f"its reproducer fails: {figure}"
        return CANNOT_SHOW, why
    if not present:
        return NOT_NEEDED, f"the defect is not there: {figure}" if figure else "the defect is not there"
    present, figure = patched
    if present is None and figure.startswith(f"{Status.CONFLICT}: "):
        return DOES_NOT_FIT, figure.removeprefix(f"{Status.CONFLICT}: ")
    if present is not False:
        return WRONG, f"with the patch: {figure or 'the defect is still there'}"
    return HELD, ""


def _try_together(parts: Mapping[str, Part], said: _Said, ask: Asking) -> None:
    """Let the reproducers of what held run with all patches, and after revert."""
    held = [key for key in parts if said[key][0] == HELD]
    together = trial.SEPARATOR.join(held)
    expected = {"all": False, "reverted": True}
    questions = [(patch_id_of(key), parts[key].name, phase, together) for key in held for phase in expected]
    for question, (present, figure) in zip(questions, ask(trial.REPRODUCER, questions, "all together")):
        phase = question[2]
        if present is not expected[phase]:
            key = next(each for each in held if (patch_id_of(each), parts[each].name) == question[:2])
            where = "with all patches" if phase == "all" else "after revert"
            said[key] = WRONG, f"{where}: {figure or ('the defect is there' if present else 'the defect is gone')}"


def _run_programs(parts: Mapping[str, Part], said: _Said, ask: Asking) -> tuple[int, dict[str, str]]:
    """Run the healthy programs without what held and with it.

    Returns how many could be run, and by program what patches changed in it that are not on trial.
    """
    held = [key for key in parts if said[key][0] == HELD]
    if not held:
        return 0, {}
    together = trial.SEPARATOR.join(held)
    ways = (trial.UNPATCHED, trial.KNOWN, "")
    questions = [(name, way, together) for name in PROGRAMS for way in ways]
    answers = ask(trial.PROGRAM, questions, "programs")
    runs = {name: answers[3 * at : 3 * at + 3] for at, name in enumerate(PROGRAMS)}
    runs = {name: found for name, found in runs.items() if found[0][0] is not None}
    harmed = {name: _change(before, known) for name, (before, known, _) in runs.items() if known != before}
    changed = [name for name, (_, known, after) in runs.items() if after != known]
    while changed:
        for name in changed:
            _blame(name, runs[name][1], held, said, ask)
        held = [key for key in held if said[key][0] == HELD]
        questions = [(name, "", trial.SEPARATOR.join(held)) for name in changed if held]
        again = ask(trial.PROGRAM, questions, "programs again") if questions else []
        changed = [name for name, after in zip(changed, again) if after != runs[name][1]]
    return len(runs), harmed


def _blame(program: str, before: Answer, held: Collection[str], said: _Said, ask: Asking) -> None:
    """Find out which patch changes a program; if none does alone, none is adopted."""
    questions = [(program, patch_id_of(key), key) for key in held]
    answers = dict(zip(held, ask(trial.PROGRAM, questions, "which patch")))
    guilty = {key: answer for key, answer in answers.items() if answer != before} or dict.fromkeys(held, before)
    for key, after in guilty.items():
        if said[key][0] != HELD:  # another program has shown it
            continue
        change = "it changes the result together with others" if after == before else _change(before, after)
        said[key] = WRONG, f"a program that was right, {program!r}: {change}"


def _change(before: Answer, after: Answer) -> str:
    return f"fails: {after[1]}" if after[0] is None else "its result changes"


def _remember(parts: Sequence[Part]) -> tuple[str, str]:
    """Write what held into the file; return its path, and why that was not possible."""
    day = datetime.date.today().isoformat()
    entries = {part.key: NEWER_RELEASES.entry(part, day) for part in parts}
    name_one = f"name a file that can be written: {adopted.VARIABLE}=FILE python -m patches adopt"
    try:
        file = adopted.adopted_file()
    except adopted.Nowhere as error:
        return "", f"{error}; {name_one}" if parts else ""
    try:
        adopted.add_entries([entry for entry in entries.values() if entry is not None])
    except OSError as error:
        return str(file), f"{file} cannot be written ({error.strerror or error}); {name_one}"
    without = [key for key, entry in entries.items() if entry is None]
    return str(file), f"{', '.join(without)}: the source cannot be read" if without else ""
