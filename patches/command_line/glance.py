"""The answers of `report` and `list` at a glance: what a person acts on, then one line for each group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import symptoms
from ..engine import table
from ..engine.patch import Patch
from ..engine.report import Report, Result, Status

ACTED_ON = (Status.CONFLICT, Status.FAILED, Status.SHADOWED, Status.UNTESTED)
"""Where the defect may be there and is not repaired, and that was not asked for."""

_NAMED = 3
"""So many ids of disabled patches are shown."""
_EFFECTS = {"repairs": "", "warns": "only warns; ", "feature": "a part of quantize_experts; "}
"""Said of a patch that repairs no defect of a library."""
_ORDER = sorted(Status, key=lambda status: status is not Status.APPLIED)


def report(found: Report) -> str:
    """``found`` in a few lines; ``str(found)`` has a line for each patch."""
    results = list(found)
    lines = [table.wrapped(table.total([result.status for result in results], _ORDER))]
    if problems := [table.wrapped(line) for line in _problems(found)]:
        lines += ["", *problems]
    lines += ["", *_groups(results), "", "a line for each patch: --all; about one: python -m patches explain ID"]
    return "\n".join(lines)


def _problems(found: Report) -> Iterator[str]:
    for result in sorted(found.with_status(*ACTED_ON), key=lambda result: ACTED_ON.index(result.status)):
        yield f"{result.status}: {result.id}: {result.reason}; without it: {result.summary}"
    if disabled := [result.id for result in found.with_status(Status.DISABLED)]:
        which = ", ".join(disabled[:_NAMED]) + (f" and {more} more" if (more := len(disabled) - _NAMED) > 0 else "")
        yield f"disabled: {which}: PATCHES_DISABLE names them or their group"
    for result in found:
        yield from (f"note: {result.id}: {note}" for note in result.notes)
    yield from (f"feature: {feature.id}: {feature.status}: {feature.reason}" for feature in found.features)
    yield from (f"note: {note}" for note in found.notes)


def _groups(results: Sequence[Result]) -> Iterator[str]:
    known, by_id = symptoms.read_symptoms(), {result.id: result for result in results}
    for key, ids in known.grouped(by_id).items():
        states = [by_id[patch_id].status for patch_id in ids]
        counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
        yield table.wrapped(f"{symptoms.GROUPS.get(key, 'Others')}: {counts}")


def patches(chosen: Sequence[Patch], headed: bool) -> str:
    """A line for each patch; ``headed``: in groups, each with its name for ``PATCHES_DISABLE``, most met first."""
    total = table.total([patch.id for patch in chosen], ())
    if not headed:
        return table.text([_row(patch) for patch in chosen], total)
    known, by_id = symptoms.read_symptoms(), {patch.id: patch for patch in chosen}
    parts = []
    for key, ids in known.grouped(by_id).items():
        title = f"{symptoms.GROUPS.get(key, 'Others')} ({key})" if key else "Others"
        parts += [table.wrapped(title), *_lines(by_id[patch_id] for patch_id in ids), ""]
    return "\n".join([*parts, total])


def _lines(chosen: Iterable[Patch]) -> list[str]:
    text = table.text([_row(patch) for patch in chosen], "")
    return text.rstrip().splitlines()


def _row(patch: Patch) -> table.Row:
    return table.Row((patch.id,), (patch.summary, f"{_EFFECTS[patch.effect]}for {'; '.join(patch.ranges())}"))
