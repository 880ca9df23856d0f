"""The truth of the project: every reproducer, run in fresh processes, without and with its patch.

For a patch that fits the installed releases the defect must be there *unpatched*, gone when the patch
is *patched* in alone and when *all* patches are in together, and back after everything was *reverted*.
For releases that are not affected it must be absent to begin with.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import gate, needs, table
from ..engine.ids import patch_id_of
from ..engine.patch import CannotShow, Finding, Part
from ..engine.report import Status
from .processes import ask_processes
from .worker import Answer

PHASES = ("unpatched", "patched", "all", "reverted")
_PRESENT = ("unpatched", "reverted")
VERDICTS = ("ok", "skipped", "cannot show", "wrong")
"""In the order in which a table shows them: what needs attention comes last."""

_CANNOT = "cannot show: "
_NOT_THERE = "its reproducer does not run there"
_MEDDLESOME = {"unsloth"}
"""Packages that patch others when they are imported: only in the processes of their own patches."""


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
        """The id, and the part if there are several."""
        return f"{self.id}: {self.part}" if self.part else self.id

    @property
    def loud(self) -> bool:
        """It needs attention."""
        return self.verdict == "wrong"


@dataclass(frozen=True)
class Verification:
    """What :func:`patches.verify` found: one row for each reproducer. ``str()`` is a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether no row is wrong; the exit code of ``python -m patches verify`` says the same."""
        return not any(row.verdict == "wrong" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """``ok``, and ``rows`` as dictionaries with the fields of :class:`Row`."""
        return {"ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON, as ``python -m patches verify --json`` prints it."""
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
        return table.total([row.verdict for row in self.rows], VERDICTS)


def verify(*ids: str, jobs: int | None = None, progress: bool = False) -> Verification:
    """:func:`patches.verify`: each phase of each reproducer in its own fresh process."""
    from ..registry import REGISTRY

    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be 1 or more, not {jobs}")
    chosen = [REGISTRY.patches[result.id] for result in REGISTRY.report(*ids)]
    parts = {(patch.id, part.name): part for patch in chosen for part in patch.parts}
    verdicts = {key: REGISTRY.verdict(part) for key, part in parts.items()}
    tasks = [(*key, phase) for key in parts for phase in _phases(verdicts[key].status)]
    findings: dict[tuple[str, str], dict[str, Answer]] = {key: {} for key in parts}
    preload = _preload([(part, verdicts[key]) for key, part in parts.items()])
    answers = ask_processes(
        f"{__name__}:run_reproducer", tasks, preload, f"{__name__}:prepare_process", jobs or min(4, _processors())
    )
    with contextlib.closing(answers), _bar(len(tasks), progress) as advance:
        for index, finding in answers:
            patch_id, name, phase = tasks[index]
            findings[patch_id, name][phase] = finding
            advance()
    return Verification(tuple(_judged(parts[key], verdicts[key], findings[key]) for key in parts))


def _preload(chosen: Sequence[tuple[Part, gate.Verdict]]) -> list[str]:
    """What more than one process needs: the packages, and the modules that are edited where there is a defect."""
    packages = {name for _, verdict in chosen for name in verdict.versions} - _MEDDLESOME
    fitting = (patch for patch, verdict in chosen if verdict.status is Status.AVAILABLE)
    edited = {
        name for patch in fitting for name in needs.modules(patch) if needs.packages(patch).isdisjoint(_MEDDLESOME)
    }
    return ["torch", *sorted(map(gate.module_name, packages)), *sorted(edited)]


def prepare_process() -> None:
    """For the process that the others are copies of: work out what patches change, which else each of them does."""
    from ..registry import REGISTRY

    REGISTRY.prepare()


def run_reproducer(patch_id: str, name: str, phase: str) -> Answer:
    """Run the reproducer of the part ``name`` of a patch in this process, which must be a fresh one; return its answer."""
    from ..registry import REGISTRY

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
        return None, f"{_CANNOT}{reason}"
    return bool(finding.present), str(finding.figure)


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[], object]]:
    """What to call after each of ``total`` steps."""
    if progress and total and sys.stderr is not None:
        with contextlib.suppress(ImportError):
            from tqdm import tqdm  # type: ignore[import-untyped]

            with tqdm(total=total, desc="verify", unit="run", file=sys.stderr, leave=False) as bar:
                yield bar.update
                return
    yield lambda: None


# -- the judgement -----------------------------------------------------------------------------


def _phases(status: Status) -> Sequence[str]:
    if status is Status.AVAILABLE:
        return PHASES
    return PHASES[:1] if status in (Status.NOT_AFFECTED, Status.UNTESTED) else ()


def _judged(part: Part, verdict: gate.Verdict, found: dict[str, Answer]) -> Row:
    def row(verdict: str, reason: str, found: dict[str, Answer]) -> Row:
        return Row(patch_id_of(part.key), verdict, reason, found, part.name)

    found = {phase: found[phase] for phase in PHASES if phase in found}
    said = [present for present, _ in found.values()]
    if not found:
        return row("skipped", verdict.reason, found)
    if found["unpatched"][1].startswith(_CANNOT):
        return row("cannot show", found["unpatched"][1].removeprefix(_CANNOT), {})
    if verdict.status is Status.UNTESTED:
        return row("skipped", verdict.reason, found)
    if verdict.status is Status.NOT_AFFECTED and said == [None]:  # an older release may lack a function that it calls
        return row("cannot show", f"{verdict.reason}; {_NOT_THERE}: {found['unpatched'][1]}", found)
    if verdict.status is Status.NOT_AFFECTED and said == [True] and gate.satisfied(part.requires[0]):
        return row(
            "skipped",
            f"{verdict.reason}; this release has the defect, and the patch does not repair it here",
            found,
        )
    expected = _expected(found)
    if said == list(expected):
        return row("ok", "" if verdict.status is Status.AVAILABLE else verdict.reason, found)
    wrong = [f"{phase}: {found[phase][1]}" for phase, e in zip(found, expected) if found[phase][0] is not e]
    return row("wrong", "; ".join(wrong), found)


_WORDS = {True: "present", False: "absent", None: "ERROR"}


def _cell(finding: Answer | None) -> str:
    if finding is None:
        return "-"
    present, figure = finding
    return f"{_WORDS[present]}: {figure}" if figure else _WORDS[present]


def _details(row: Row) -> list[str]:
    """For a wrong row every phase with the expected answer, for others the reason or the figures."""
    if row.verdict == "wrong":
        said = zip(row.findings.items(), _expected(row.findings))
        return [f"{p}: {'' if f[0] is must else f'must be {_WORDS[must]}, is '}{_cell(f)}" for (p, f), must in said]
    if row.reason:
        return [row.reason]
    return [f"{phase}: {row.findings[phase][1]}" for phase in PHASES[:2] if row.findings.get(phase, (0, ""))[1]]


def _expected(phases: Collection[str]) -> tuple[bool, ...]:
    """Whether the defect must be there in each phase; in the first alone, of a release without it, it must not."""
    return tuple(phase in _PRESENT for phase in phases) if len(phases) > 1 else (False,)
