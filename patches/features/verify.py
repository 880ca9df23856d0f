"""The truth of the project: every reproducer, run in fresh processes, without and with its patch.

For a patch that fits the installed releases the defect must be there *unpatched*, gone when the patch
is *patched* in alone and when *all* patches are in together, and back after everything was *reverted*.
For releases that are not affected it must be absent to begin with.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import gate, table
from ..engine.patch import CannotShow, Finding, Patch
from ..engine.report import Status

PHASES = ("unpatched", "patched", "all", "reverted")
VERDICTS = ("ok", "skipped", "cannot show", "wrong")
"""In the order in which a table shows them: what needs attention comes last."""
TIMEOUT = 300.0
"""Seconds that one reproducer may take; on a busy machine the first of them pays for the imports."""


@dataclass(frozen=True)
class Row:
    """One patch: what its reproducer said in each phase, and whether that is as it must be.

    ``verdict`` is ``"ok"``, ``"wrong"``, ``"cannot show"`` or ``"skipped"``; ``findings`` holds
    ``(present, figure)`` for each phase that ran, ``present`` being ``None`` where it raised.
    """

    id: str
    verdict: str
    reason: str
    findings: dict[str, tuple[bool | None, str]]

    @property
    def loud(self) -> bool:
        """It needs attention."""
        return self.verdict == "wrong"


@dataclass(frozen=True)
class Verification:
    """All rows. ``ok`` is false if one is wrong."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return not any(row.verdict == "wrong" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        rows = [table.Row((row.verdict, row.id), _details(row), row.loud) for row in self._sorted()]
        return table.text(rows, self._total())

    def _repr_html_(self) -> str:
        rows = []
        for row in self._sorted():
            phases = [_cell(row.findings.get(phase)) for phase in PHASES]
            rows.append(table.Row((row.verdict, row.id, *phases), (row.reason,), row.loud))
        return table.as_html(("verdict", "patch", *PHASES, "why"), rows, self._total())

    def _sorted(self) -> list[Row]:
        return sorted(self.rows, key=lambda row: VERDICTS.index(row.verdict))

    def _total(self) -> str:
        return table.total([row.verdict for row in self.rows], VERDICTS)


def verify(*ids: str, jobs: int | None = None, progress: bool = False) -> Verification:
    """Run the reproducers of the named patches, or of all, each phase in its own fresh process.

    Parameters
    ----------
    jobs:
        How many processes at a time; by default as many as there are processors, at most four.
    progress:
        Show a progress bar on standard error (needs tqdm).

    Raises
    ------
    KeyError
        An id is unknown.
    """
    from .. import REGISTRY

    chosen = [REGISTRY.patches[result.id] for result in REGISTRY.report(*ids)]
    verdicts = {patch.id: gate.check(patch) for patch in chosen}
    tasks = [(p, phase) for p in chosen for phase in _phases(verdicts[p.id].status)]
    findings: dict[str, dict[str, tuple[bool | None, str]]] = {patch.id: {} for patch in chosen}
    with _fresh_processes(chosen) as context, ThreadPoolExecutor(jobs or min(4, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(_run, context, p.id, phase): (p, phase) for p, phase in tasks}
        for future in _shown(as_completed(futures), len(futures), progress):
            patch, phase = futures[future]
            findings[patch.id][phase] = future.result()
    return Verification(tuple(_judged(p, verdicts[p.id], findings[p.id]) for p in chosen))


def _phases(status: Status) -> Sequence[str]:
    if status is Status.AVAILABLE:
        return PHASES
    return PHASES[:1] if status in (Status.NOT_AFFECTED, Status.UNTESTED) else ()


def _judged(patch: Patch, verdict: gate.Verdict, found: dict[str, tuple[bool | None, str]]) -> Row:
    found = {phase: found[phase] for phase in PHASES if phase in found}
    said = [present for present, _ in found.values()]
    if not found:
        return Row(patch.id, "skipped", verdict.reason, found)
    if found["unpatched"][1].startswith(_CANNOT):
        return Row(patch.id, "cannot show", found["unpatched"][1].removeprefix(_CANNOT), {})
    if verdict.status is Status.UNTESTED:
        return Row(patch.id, "skipped", verdict.reason, found)
    if verdict.status is Status.NOT_AFFECTED and said == [None]:  # an older release may lack what it calls
        return Row(patch.id, "cannot show", f"{verdict.reason}; {_NOT_THERE}: {found['unpatched'][1]}", found)
    if verdict.status is Status.NOT_AFFECTED and said == [True] and gate.satisfied(patch.requires[0]):
        return Row(patch.id, "skipped", f"{verdict.reason}; the defect is there, and is not repaired there", found)
    expected = _expected(len(found))
    if said == list(expected):
        return Row(patch.id, "ok", "" if verdict.status is Status.AVAILABLE else verdict.reason, found)
    wrong = [f"{phase}: {found[phase][1]}" for phase, e in zip(found, expected) if found[phase][0] is not e]
    return Row(patch.id, "wrong", "; ".join(wrong), found)


_WORDS = {True: "present", False: "absent", None: "ERROR"}


def _cell(finding: tuple[bool | None, str] | None) -> str:
    if finding is None:
        return "-"
    present, figure = finding
    return f"{_WORDS[present]}: {figure}" if figure else _WORDS[present]


def _details(row: Row) -> list[str]:
    """For a wrong row every phase and what it must be, for others the reason or what was measured."""
    if row.verdict == "wrong":
        said = zip(row.findings.items(), _expected(len(row.findings)))
        return [f"{p}: {'' if f[0] is must else f'must be {_WORDS[must]}, is '}{_cell(f)}" for (p, f), must in said]
    if row.reason:
        return [row.reason]
    return [f"{phase}: {row.findings[phase][1]}" for phase in PHASES[:2] if row.findings.get(phase, (0, ""))[1]]


def _expected(phases: int) -> tuple[bool, ...]:
    """Whether the defect must be there, in all phases, or in the first alone: that of a release without it."""
    return (True, False, False, True) if phases == len(PHASES) else (False,)


# -- fresh processes ---------------------------------------------------------------------------

_CANNOT = "cannot show: "
_NOT_THERE = "its reproducer does not run there"
_MEDDLESOME = {"unsloth"}
"""Packages that patch others when they are imported: only in the processes of their own patches."""


@contextlib.contextmanager
def _fresh_processes(chosen: Sequence[Patch]) -> Iterator[Any]:
    """A multiprocessing context whose processes begin unpatched.

    On a CPU they are forked from a server that has only imported the packages, so that each costs
    little; a CUDA runtime does not survive a fork, so where there is one they are started anew.
    """
    before = os.environ.get("PATCHES_AUTOLOAD")
    os.environ["PATCHES_AUTOLOAD"] = "0"
    try:
        if _has_accelerator() or "forkserver" not in multiprocessing.get_all_start_methods():
            yield multiprocessing.get_context("spawn")
            return
        context = multiprocessing.get_context("forkserver")
        names = sorted({name for p in chosen for name in gate.check(p).versions} - _MEDDLESOME)
        context.set_forkserver_preload(["torch", *names, __name__])
        with _silent():
            multiprocessing.forkserver.ensure_running()
        yield context
    finally:
        if before is None:
            del os.environ["PATCHES_AUTOLOAD"]
        else:
            os.environ["PATCHES_AUTOLOAD"] = before


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Processes started inside write to nowhere: what imports print has no place in the table."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _has_accelerator() -> bool:
    try:
        import torch

        return torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
    except ImportError:
        return False


def _run(context: Any, patch_id: str, phase: str) -> tuple[bool | None, str]:
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(patch_id, phase, send), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(TIMEOUT):
            process.kill()
            return None, f"no answer in {TIMEOUT:.0f} s"
        return receive.recv()
    except EOFError:
        process.join()
        return None, f"the process died with exit code {process.exitcode}"
    finally:
        process.join(5)


def _child(patch_id: str, phase: str, send: Any) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # the table is the output
    try:
        send.send(_answer(patch_id, phase))
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno}"
        send.send((None, f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:300]}"))


def _answer(patch_id: str, phase: str) -> tuple[bool | None, str]:
    from .. import REGISTRY

    patch = REGISTRY.patches[patch_id]
    if phase != "unpatched":
        REGISTRY.import_targets(patch)
        REGISTRY.apply(*([patch_id] if phase == "patched" else []))
        result = REGISTRY.report(patch_id)[patch_id]
        if result.status is not Status.APPLIED:
            return None, f"{result.status}: {result.reason}"
    if phase == "reverted":
        REGISTRY.revert()
    try:
        finding: Finding = patch.defect()
    except CannotShow as reason:
        return None, f"{_CANNOT}{reason}"
    return bool(finding.present), finding.figure


def _shown(futures: Iterator[Any], total: int, progress: bool) -> Iterator[Any]:
    if progress:
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(futures, total=total, desc="verify", unit="run", file=sys.stderr, leave=False)
    return futures
