"""The answers of `report` and `list` at a glance: what a person acts on, then one line for each group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import symptoms
from ..engine import table
from ..engine.patch import Patch
from ..engine.report import Report, Status
from ..process_registry import REGISTRY
from .explain import EFFECTS

ACTED_ON = (Status.CONFLICT, Status.FAILED, Status.SHADOWED, Status.UNTESTED)
"""States in which the defect may be there and is not repaired, without being disabled."""

_SHOWN_DISABLED = 3
_ORDER = sorted(Status, key=lambda status: status is not Status.APPLIED)


def report(found: Report) -> str:
    """Say ``found`` in a few lines; ``str(found)`` has a line for each patch."""
    lines = [table.wrapped(table.total([result.status for result in found], _ORDER))]
    if problems := [table.wrapped(line) for line in _problems(found)]:
        lines += ["", *problems]
    lines += ["", *_groups(found), "", "a line for each patch: --all; about one: python -m patches explain ID"]
    return "\n".join(lines)


def _problems(found: Report) -> Iterator[str]:
    for result in sorted(found.with_status(*ACTED_ON), key=lambda result: ACTED_ON.index(result.status)):
        yield f"{result.status}: {result.id}: {result.reason}; without it: {result.summary}"
    if disabled := [result.id for result in found.with_status(Status.DISABLED)]:
        more = len(disabled) - _SHOWN_DISABLED
        which = ", ".join(disabled[:_SHOWN_DISABLED]) + (f" and {more} more" if more > 0 else "")
        yield f"disabled: {which}: PATCHES_DISABLE names them or their group"
    for result in found:
        yield from (f"note: {result.id}: {note}" for note in result.notes)
    yield from (f"feature: {feature.id}: {feature.status}: {feature.reason}" for feature in found.features)
    yield from (f"note: {note}" for note in found.notes)


def _groups(found: Report) -> Iterator[str]:
    for key, group in symptoms.group_patches(REGISTRY.patches[result.id] for result in found).items():
        states = [found[patch.id].status for patch in group]
        counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
        yield table.wrapped(f"{symptoms.GROUPS[key]}: {counts}")


def patches(chosen: Sequence[Patch], headed: bool) -> str:
    """Return a line for each patch; ``headed``: in groups, each with its name for ``PATCHES_DISABLE``."""
    total = table.total([patch.id for patch in chosen], ())
    if not headed:
        return table.text(_rows(chosen), total)
    lines = []
    for key, group in symptoms.group_patches(chosen).items():
        title = table.wrapped(f"{symptoms.GROUPS[key]} ({key})")
        lines += [title, *table.text(_rows(group), "").rstrip().splitlines(), ""]
    return "\n".join([*lines, total])


def _rows(chosen: Iterable[Patch]) -> list[table.Row]:
    rows = []
    for patch in chosen:
        effect = f"{EFFECTS[patch.effect].label}; " if patch.effect in EFFECTS else ""
        rows.append(table.Row((patch.id,), (patch.summary, f"{effect}for {'; '.join(patch.ranges())}")))
    return rows
