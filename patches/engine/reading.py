"""The state of each patch for a report, read from the process now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from . import gate, idle_names, needs
from .edits import Edit
from .function_source import Conflict
from .patch import Feature, Part, Patch
from .report import Change, Result, Status
from .slots import NameSlot, Slot, slots_of
from .state import Installed, State

_AGAIN = "was reloaded after the patch was applied; call apply() again"
_KEPT = "was not reverted with the rest, because another program had changed it; call revert() or apply() again"


_PRECEDENCE = (
    Status.CONFLICT,
    Status.FAILED,
    Status.SHADOWED,
    Status.UNTESTED,
    Status.APPLIED,
    Status.AVAILABLE,
    Status.DISABLED,
    Status.REVERTED,
    Status.PENDING,
    Status.NOT_AFFECTED,
    Status.NOT_INSTALLED,
)
"""A patch takes the first of these states that one of its parts has."""


def result(state: State, patch: Patch, check: Callable[[Part], gate.Verdict], *, disabled: bool) -> Result:
    """Return the state of ``patch`` and the reason; ``check`` says whether a part is for the installed releases."""
    found = [part_result(state, patch, part, check(part), disabled=disabled) for part in patch.parts]
    if len(found) == 1:
        return found[0]
    status = min((each.status for each in found), key=_PRECEDENCE.index)
    parts_by_reason: dict[str, list[str]] = {}
    for part, each in zip(patch.parts, found):
        if each.status is status and each.reason:
            parts_by_reason.setdefault(each.reason, []).append(part.name)
    if len(parts_by_reason) > 1:
        reason = "; ".join(f"{', '.join(names)}: {why}" for why, names in parts_by_reason.items())
    else:
        reason = "".join(parts_by_reason)
    return Result(
        patch.id,
        patch.summary,
        status,
        reason,
        {name: version for each in found for name, version in each.versions.items()},
        tuple(change for each in found for change in each.changes),
        tuple(dict.fromkeys(note for each in found for note in each.notes)),
        patch.links,
        patch.former_ids,
    )


def part_result(state: State, patch: Patch, part: Part, verdict: gate.Verdict, *, disabled: bool) -> Result:
    """Return the state of ``part`` of ``patch`` and the reason."""
    outcome = state.outcomes.get(part.key)
    active = state.active.get(part.key, ())
    status, reason = verdict.status, verdict.reason
    notes: tuple[str, ...] = ()
    active = [known for known in active if known.slot.alive]
    if active:
        status, reason = _of_active(state, needs.edits(part, state.libraries), active)
        if outcome is not None:
            if status is Status.AVAILABLE and outcome.status is Status.SHADOWED:  # a revert, and not a reload
                reason = f"{_names(active)} {_KEPT}"
            reason, notes = reason or outcome.reason, outcome.notes
        if status is Status.APPLIED and verdict.status is Status.AVAILABLE:
            reason = reason or verdict.reason
    elif disabled:
        status, reason = Status.DISABLED, "PATCHES_DISABLE names it or its group"
    elif outcome is not None and outcome.status is not Status.APPLIED:
        status, reason = outcome.status, outcome.reason
    elif status is Status.AVAILABLE and (missing := needs.modules_not_imported(part, state.libraries)):
        status = Status.PENDING
        follows = (
            "the patch is applied after its import" if part.key in state.waiting else "call apply() after its import"
        )
        reason = f"{', '.join(sorted(missing))} is not imported yet; {follows}"
    elif status is Status.AVAILABLE and outcome is not None:
        reason = f"the changed code {_AGAIN}"
    changes = _changes(active, part.key)
    return Result(
        patch.id, patch.summary, status, reason, verdict.versions, changes, notes, patch.links, patch.former_ids
    )


def features(state: State, known: Iterable[Feature]) -> Iterator[Result]:
    """Give the features that are in."""
    for feature in known:
        if active := state.active.get(feature.id):
            status, reason = _of_active(state, feature.edits, active)
            yield Result(feature.id, feature.summary, status, reason, changes=_changes(active, feature.id))


def notes(state: State, results: Iterable[Result]) -> Iterator[str]:
    """Give the sentences that concern the process as a whole; ``results`` name the packages."""
    yield from idle_names.describe(state)
    yield from state.notes
    for package in dict.fromkeys(name for each in results for name in each.versions):
        if said := gate.mismatch(package, state.libraries):
            yield said


def _of_active(state: State, edits: Iterable[Edit], active: Sequence[Installed]) -> tuple[Status, str]:
    """Return the state of an owner that has edits in, and the reason."""
    lost = [
        f"{known.slot.name} was changed by another program after the patch was applied"
        for known in active
        if known.shadowed
    ]
    keys = {known.slot.key for known in active}
    try:
        slots = [slot for edit in edits for slot, _ in slots_of(edit, state) if not isinstance(slot, NameSlot)]
        others = [slot.name for slot in slots if slot.key not in keys]
    except Conflict:  # something of someone else's stands there, or nothing
        lost += filter(None, (known.slot.displaced() for known in active))
    else:
        if others and not lost:
            return Status.AVAILABLE, f"{others[0]} {_AGAIN}"
    return (Status.SHADOWED, "; ".join(lost)) if lost else (Status.APPLIED, "")


def _names(active: Iterable[Installed]) -> str:
    return ", ".join(known.slot.name for known in active if not isinstance(known.slot, NameSlot))


def _changes(active: Iterable[Installed], owner: str) -> tuple[Change, ...]:
    changes = []
    for known in active:
        mine = [edit for name, edit in known.edits if name == owner]
        if known.value is not known.original:  # else it was there already, or absent already
            changes.append(Change(known.slot.name, partial(_diff, known.slot, known.original, mine)))
    return tuple(changes)


def _diff(slot: Slot, original: Any, edits: list[Edit]) -> str:
    """Show what ``edits`` alone make of ``original``."""
    try:
        return slot.diff(original, edits)
    except Conflict as conflict:
        return f"# {conflict}\n"
