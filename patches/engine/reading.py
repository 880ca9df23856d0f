"""The state of each patch for a report, read from the process now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from . import frames, gate, needs
from .edits import Edit
from .locate import Conflict
from .patch import Feature, Part, Patch
from .plan import in_use
from .report import Change, Result, Status
from .slots import NameSlot, Slot, slots_of
from .state import Installed, State

_AGAIN = "was reloaded after the patch was applied; call apply() again"


_FIRST = (
    Status.CONFLICT, Status.FAILED, Status.SHADOWED, Status.UNTESTED, Status.APPLIED, Status.AVAILABLE, Status.DISABLED,
    Status.REVERTED, Status.PENDING, Status.NOT_AFFECTED, Status.NOT_INSTALLED,
)  # fmt: skip
"""The patch takes the first of these states that one of its parts has."""


def result(state: State, patch: Patch, *, disabled: bool) -> Result:
    """What became of ``patch``, and why."""
    found = [part_result(state, patch, part, disabled=disabled) for part in patch.parts]
    if len(found) == 1:
        return found[0]
    status = min((each.status for each in found), key=_FIRST.index)
    reasons = {
        each.reason: part.name for part, each in zip(patch.parts, found) if each.status is status and each.reason
    }
    return Result(
        patch.id,
        patch.summary,
        status,
        "; ".join(f"{name}: {reason}" if len(reasons) > 1 else reason for reason, name in reasons.items()),
        {name: version for each in found for name, version in each.versions.items()},
        tuple(change for each in found for change in each.changes),
        tuple(dict.fromkeys(note for each in found for note in each.notes)),
        patch.links,
        patch.former_ids,
    )


def part_results(state: State, patches: Mapping[str, Patch], keys: Collection[str]) -> tuple[Result, ...]:
    """What became of the parts ``keys``, which are not disabled or were put in by name."""
    chosen = [(patch, part) for patch in patches.values() for part in patch.parts if part.key in keys]
    return tuple(part_result(state, patch, part, disabled=False) for patch, part in chosen)


def part_result(state: State, patch: Patch, part: Part, *, disabled: bool) -> Result:
    """What became of ``part`` of ``patch``, and why."""
    verdict = gate.check(part)
    outcome = state.outcomes.get(part.key)
    active = state.active.get(part.key, ())
    status, reason = verdict.status, verdict.reason
    notes: tuple[str, ...] = ()
    active = [known for known in active if known.slot.alive]
    if active:
        status, reason = _of_active(needs.edits(part), active)
        if outcome is not None:
            reason, notes = reason or outcome.reason, outcome.notes
    elif disabled:
        status, reason = Status.DISABLED, "PATCHES_DISABLE names it or its group"
    elif outcome is not None and outcome.status is not Status.APPLIED:
        status, reason = outcome.status, outcome.reason
    elif status is Status.AVAILABLE and (missing := needs.missing(part)):
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
    """The features that are in."""
    for feature in known:
        if active := state.active.get(feature.id):
            status, reason = _of_active(feature.edits, active)
            yield Result(feature.id, feature.summary, status, reason, changes=_changes(active, feature.id))


def left_behind(state: State) -> Iterator[str]:
    """Names that had to stay when their patches were reverted, and what needs them."""
    idle = [known.slot for known in state.slots.values() if not known.edits and known.slot.alive]
    if not idle:
        return
    names = {slot.attribute for slot in idle if isinstance(slot, NameSlot)}
    codes = [code for code in in_use(state) if frames.named_in([code], names)]
    spaces = {id(module): vars(module) for slot in idle if (module := slot.held()) is not None}
    who = ", ".join(frames.holders(codes, spaces.values())) or "a frame, a generator or a tool that keeps it"
    yield (
        f"{who} still runs code of reverted patches, so the names that this code uses stay: "
        f"{', '.join(sorted(s.name for s in idle))}. Once the code has ended, patches.report(), apply() or revert() "
        "removes these names"
    )


def _of_active(edits: Iterable[Edit], active: Sequence[Installed]) -> tuple[Status, str]:
    """The state of an owner that has edits in."""
    lost = [
        f"{known.slot.name} was changed by another program after the patch was applied"
        for known in active
        if known.shadowed
    ]
    keys = {known.slot.key for known in active}
    try:
        slots = [slot for edit in edits for slot, _ in slots_of(edit) if not isinstance(slot, NameSlot)]
        others = [slot.name for slot in slots if slot.key not in keys]
    except Conflict:  # something of someone else's stands there, or nothing
        lost += filter(None, (known.slot.displaced() for known in active))
    else:
        if others and not lost:
            return Status.AVAILABLE, f"{others[0]} {_AGAIN}"
    return (Status.SHADOWED, "; ".join(lost)) if lost else (Status.APPLIED, "")


def _changes(active: Iterable[Installed], owner: str) -> tuple[Change, ...]:
    changes = []
    for known in active:
        mine = [edit for name, edit in known.edits if name == owner]
        if known.value is not known.original:  # else it was there already, or absent already
            changes.append(Change(known.slot.name, partial(_diff, known.slot, known.original, mine)))
    return tuple(changes)


def _diff(slot: Slot, original: Any, edits: list[Edit]) -> str:
    """What ``edits`` alone make of ``original``."""
    try:
        return slot.diff(original, edits)
    except Conflict as conflict:
        return f"# {conflict}\n"
