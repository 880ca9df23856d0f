"""The answers of `report` and `list` at a glance: what a person acts on, then one line for each group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from .. import symptoms
from ..engine import table
from ..engine.patch import Patch
from ..engine.report import Report, Status
from ..process_registry import REGISTRY
from .explain import EFFECTS

ACTED_ON = (Status.CONFLICT, Status.FAILED, Status.SHADOWED, Status.UNTESTED)
"""States in which the defect may be there and is not repaired, without being disabled."""

_NOT_APPLIED = (
    Status.DISABLED,
    Status.AVAILABLE,
    Status.REVERTED,
    Status.PENDING,
    Status.NOT_AFFECTED,
    Status.NOT_INSTALLED,
)
"""The other states of a patch that is not applied, what one may act on first."""
_OUTSIDE = re.compile(r"(\S+ \S+ is outside) (\S+)")
_MORE = "one line a patch: --all; with the packages imported: --live; about one patch: python -m patches explain ID"
_ORDER = sorted(Status, key=lambda status: status is not Status.APPLIED)


def report(found: Report) -> str:
    """Say ``found`` in a few lines; ``str(found)`` has a line for each patch."""
    total = table.total([result.status for result in found], _ORDER)
    blocks = [[total], _problems(found), _not_applied(found), _notes(found), _groups(found), [_MORE]]
    texts = ["\n".join(map(table.wrapped, block)) for block in blocks]
    return "\n\n".join(filter(None, texts))


def _problems(found: Report) -> Iterator[str]:
    for result in sorted(found.with_status(*ACTED_ON), key=lambda result: ACTED_ON.index(result.status)):
        yield f"{result.status}: {result.id}: {result.reason}; without it: {result.summary}"


def _not_applied(found: Report) -> Iterator[str]:
    """Give a line for each reason why patches are not applied that one need not act on."""
    ids: dict[tuple[Status, str], list[str]] = {}
    for result in sorted(found.with_status(*_NOT_APPLIED), key=lambda result: _NOT_APPLIED.index(result.status)):
        outside = _OUTSIDE.fullmatch(result.reason)  # the ranges differ, the release is the same
        reason = f"{outside[1]} the range of" if outside else result.reason
        ids.setdefault((result.status, reason), []).append(f"{result.id} ({outside[2]})" if outside else result.id)
    for (status, reason), own in ids.items():
        yield ": ".join(filter(None, (status, reason, ", ".join(own))))


def _notes(found: Report) -> Iterator[str]:
    for result in found:
        yield from (f"note: {result.id}: {note}" for note in result.notes)
    yield from (f"feature: {feature.id}: {feature.status}: {feature.reason}" for feature in found.features)
    yield from (f"note: {note}" for note in found.notes)


def _groups(found: Report) -> Iterator[str]:
    for key, group in symptoms.group_patches(REGISTRY.patches[result.id] for result in found).items():
        states = [found[patch.id].status for patch in group]
        counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
        yield f"{symptoms.GROUPS[key]}: {counts}"


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
