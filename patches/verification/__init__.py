"""The truth of the project: every reproducer, run in fresh processes, without and with its patch.

For a patch that fits the installed releases the defect must be there *unpatched*, gone when the patch
is *patched* in alone and when *all* patches are in together, and back after everything was *reverted*.
For releases that are not affected it must be absent to begin with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import gate, needs, table
from ..engine.ids import patch_id_of
from ..engine.patch import CannotShow, Finding, Part
from ..engine.report import Status
from ..process_registry import REGISTRY
from .asking import Asking
from .processes import number_of_jobs
from .worker import Answer

PHASES = ("unpatched", "patched", "all", "reverted")
_PRESENT = ("unpatched", "reverted")
VERDICTS = ("ok", "skipped", "cannot show", "wrong")
"""In the order in which a table shows them: what needs attention comes last."""
CANNOT = "cannot show: "
_NOT_THERE = "its reproducer does not run there"
_MEDDLESOME = {"unsloth"}
"""Packages that patch others when they are imported: only in the processes of their own patches."""
_WORDS = {True: "present", False: "absent", None: "ERROR"}


@dataclass(frozen=True)
class Row:
    """One reproducer of a patch: its answer in each phase, and whether that is as it must be.

    ``part`` names it where the patch has several, and is empty where it has one.
    ``verdict`` is ``"ok"``, ``"wrong"``, ``"cannot show"`` or ``"skipped"``; ``findings`` holds
    ``(present, figure)`` for each phase that ran, ``present`` being ``None`` where it raised.
    """

    id: str
    verdict: str
    reason: str
    findings: dict[str, Answer]
    part: str = ""

    @property
    def name(self) -> str:
        """The id, with the part if there are several."""
        return f"{self.id}: {self.part}" if self.part else self.id

    @property
    def loud(self) -> bool:
        """Whether it needs attention."""
        return self.verdict == "wrong"


@dataclass(frozen=True)
class Verification:
    """The findings of :func:`patches.verify`: one row for each reproducer. ``str()`` is a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether no row is wrong; the exit code of ``python -m patches verify`` says the same."""
        return not any(row.loud for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok``, and ``rows`` as dictionaries with the fields of :class:`Row`."""
        return {"ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON, as ``python -m patches verify --json`` prints it."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        rows = [table.Row((row.verdict, row.name), _details(row), row.loud) for row in self._sorted()]
        return table.text(rows, self._total())

    def _repr_html_(self) -> str:
        rows = []
        for row in self._sorted():
            phases = [_cell(row.findings.get(phase)) for phase in PHASES]
            rows.append(table.Row((row.verdict, row.name, *phases), (row.reason,), row.loud))
        return table.as_html(("verdict", "patch", *PHASES, "why"), rows, self._total())

    def _sorted(self) -> list[Row]:
        return sorted(self.rows, key=lambda row: VERDICTS.index(row.verdict))

    def _total(self) -> str:
        return table.total([row.verdict for row in self.rows], VERDICTS, ("reproducer", "reproducers"))


def verify(*ids: str, jobs: int | None = None, progress: bool = False) -> Verification:
    """Run the reproducers of the named patches, or of all, in fresh processes.

    Each runs without its patch, with it alone, with all patches together, and after revert. The call works anywhere: in
    a script without a main guard, a notebook, a thread. The processes end with the call, also if an exception or
    Ctrl-C ends it.

    Parameters
    ----------
    ids:
        Ids of patches, such as ``"peft-dora-cache"``; all if there is none.
    jobs:
        How many processes at a time; by default as many as there are processors, at most four.
    progress:
        Show on standard error how many runs are done.

    Raises
    ------
    KeyError
        An id is unknown.
    ValueError
        ``jobs`` is less than one.
    NoInterpreter
        This program is frozen: there is no Python to start.
    """
    return verify_by(f"{__name__}:run_reproducer", (), ids, jobs, progress)


def verify_by(function: str, more: Sequence[str], ids: Sequence[str], jobs: int | None, progress: bool) -> Verification:
    """Let ``function``, as ``module:name``, run each reproducer; it is called as :func:`run_reproducer` and with ``more``."""
    jobs = number_of_jobs(jobs)
    parts = {(patch.id, part.name): part for patch in REGISTRY.ids.choose(tuple(ids)) for part in patch.parts}
    verdicts = {key: REGISTRY.verdict(part) for key, part in parts.items()}
    tasks = [(*key, phase) for key in parts for phase in _phases(verdicts[key].status)]
    findings: dict[tuple[str, str], dict[str, Answer]] = {key: {} for key in parts}
    ask = Asking(modules_to_preload([(part, verdicts[key]) for key, part in parts.items()]), jobs, progress)
    for (patch_id, name, phase), finding in zip(tasks, ask(function, [(*task, *more) for task in tasks], "verify")):
        findings[patch_id, name][phase] = finding
    return Verification(tuple(_judged(parts[key], verdicts[key], findings[key]) for key in parts))


def modules_to_preload(chosen: Sequence[tuple[Part, gate.Verdict]]) -> list[str]:
    """Name what several processes import: the packages, and the modules that are edited where there is a defect."""
    packages = {name for _, verdict in chosen for name in verdict.versions} - _MEDDLESOME
    edited: set[str] = set()
    for part, verdict in chosen:
        if verdict.status is Status.AVAILABLE and needs.packages(part).isdisjoint(_MEDDLESOME):
            edited |= needs.modules(part)
    return ["torch", *sorted(map(gate.module_name, packages)), *sorted(edited)]


def run_reproducer(patch_id: str, name: str, phase: str) -> Answer:
    """Run the reproducer of the part ``name`` of a patch in this process, which must be a fresh one; return its answer."""
    part = next(part for part in REGISTRY.patches[patch_id].parts if part.name == name)
    if phase != "unpatched":
        REGISTRY.import_targets(part)
        REGISTRY.apply(*([patch_id] if phase == "patched" else []))
        result = REGISTRY.report(patch_id)[patch_id]
        if result.status is not Status.APPLIED:
            return None, f"{result.status}: {result.reason}"
    if phase == "reverted":
        REGISTRY.revert()
    try:
        finding: Finding = part.defect()
    except CannotShow as reason:
        return None, f"{CANNOT}{reason}"
    return bool(finding.present), str(finding.figure)


# -- the judgement -----------------------------------------------------------------------------


def _phases(status: Status) -> Sequence[str]:
    if status is Status.AVAILABLE:
        return PHASES
    return PHASES[:1] if status in (Status.NOT_AFFECTED, Status.UNTESTED) else ()


def _judged(part: Part, verdict: gate.Verdict, found: dict[str, Answer]) -> Row:
    found = {phase: found[phase] for phase in PHASES if phase in found}
    word, reason = _judgement(part, verdict, found)
    if found and found["unpatched"][1].startswith(CANNOT):
        found = {}
    return Row(patch_id_of(part.key), word, reason, found, part.name)


def _judgement(part: Part, verdict: gate.Verdict, found: dict[str, Answer]) -> tuple[str, str]:
    """Return the verdict of a row and its reason."""
    if not found:
        return "skipped", verdict.reason
    present, figure = found["unpatched"]
    if figure.startswith(CANNOT):
        return "cannot show", figure.removeprefix(CANNOT)
    if verdict.status is Status.UNTESTED:
        return "skipped", verdict.reason
    if verdict.status is Status.NOT_AFFECTED and present is None:  # an older release may lack a function that it calls
        return "cannot show", f"{verdict.reason}; {_NOT_THERE}: {figure}"
    if verdict.status is Status.NOT_AFFECTED and present and gate.satisfied(part.requires[0]):
        return "skipped", f"{verdict.reason}; this release has the defect, and the patch does not repair it here"
    wrong = [f"{phase}: {found[phase][1]}" for phase, must in _expected(found) if found[phase][0] is not must]
    return ("wrong", "; ".join(wrong)) if wrong else ("ok", verdict.reason)


def _cell(finding: Answer | None) -> str:
    if finding is None:
        return "-"
    present, figure = finding
    return f"{_WORDS[present]}: {figure}" if figure else _WORDS[present]


def _details(row: Row) -> list[str]:
    """List every phase of a wrong row with the expected answer, of others the reason or the figures."""
    if row.loud:
        lines = []
        for phase, must in _expected(row.findings):
            finding = row.findings[phase]
            lines.append(f"{phase}: {'' if finding[0] is must else f'must be {_WORDS[must]}, is '}{_cell(finding)}")
        return lines
    if row.reason:
        return [row.reason]
    return [f"{phase}: {row.findings[phase][1]}" for phase in PHASES[:2] if row.findings.get(phase, (0, ""))[1]]


def _expected(phases: Collection[str]) -> list[tuple[str, bool]]:
    """Say for each phase whether the defect must be there. In the first alone, of a release without it, it must not."""
    return [(phase, phase in _PRESENT and len(phases) > 1) for phase in phases]
