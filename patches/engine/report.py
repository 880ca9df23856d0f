"""What became of the patches, as plain data, a table or JSON."""

from __future__ import annotations

import enum
import html
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import table


class Status(str, enum.Enum):
    """Where a patch stands in this process."""

    PENDING = "pending"
    """Its package is not imported yet; the patch is applied right after the import."""
    AVAILABLE = "available"
    """The patch fits, but was not applied, or its module was reloaded after it was applied."""
    NOT_INSTALLED = "not installed"
    """A package that the patch repairs is missing."""
    NOT_AFFECTED = "not affected"
    """The installed release is outside the range that has the defect."""
    UNTESTED = "untested"
    """The installed release is newer than any that the patch was tested on, and its source is not known: not applied."""
    DISABLED = "disabled"
    """``PATCHES_DISABLE`` names the patch or its group."""
    APPLIED = "applied"
    REVERTED = "reverted"
    CONFLICT = "conflict"
    """The installed code differs from what the patch expects; nothing was changed."""
    SHADOWED = "shadowed"
    """Another program changed the same function or attribute, and the patch left that change alone."""
    FAILED = "failed"
    """Applying the patch raised an error; all its changes were undone."""

    def __str__(self) -> str:
        return self.value


_LOUD = (Status.UNTESTED, Status.SHADOWED, Status.CONFLICT, Status.FAILED)
"""States that need the reader's attention: the defect may be there, and is not repaired."""

_ORDER = sorted(Status, key=lambda status: (status in _LOUD, status is not Status.APPLIED))
"""In which a table shows them."""


@dataclass(frozen=True)
class Change:
    """One place that a patch changed. ``target`` names it: ``"package.module:Class.attribute"``."""

    target: str
    render: Callable[[], str] = field(repr=False, compare=False)

    @cached_property
    def diff(self) -> str:
        """The change as a unified diff. Made when it is first asked for: most reports are read for their states only."""
        return self.render()


@dataclass(frozen=True)
class Result:
    """The state of one patch in this process, and why."""

    id: str
    summary: str
    """What goes wrong without the patch, in one line."""
    status: Status
    reason: str = ""
    """Why the patch is in this state; empty if the state says it."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """The installed release of each package that the patch requires; None if it is not installed."""
    changes: tuple[Change, ...] = ()
    """What the patch has changed; empty unless it is applied."""
    notes: tuple[str, ...] = ()
    """Objects that the defect had damaged before the patch was applied, one sentence each."""
    links: tuple[str, ...] = ()
    """Upstream issues and pull requests."""
    former_ids: tuple[str, ...] = ()
    """Ids that earlier releases had for the patch."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by their names; ``changes`` as dictionaries with ``target`` and ``diff``."""
        return {
            "id": self.id,
            "summary": self.summary,
            "status": str(self.status),
            "reason": self.reason,
            "versions": dict(self.versions),
            "changes": [{"target": c.target, "diff": c.diff} for c in self.changes],
            "notes": list(self.notes),
            "links": list(self.links),
            "former_ids": list(self.former_ids),
        }


@dataclass(frozen=True)
class Report:
    """The state of the patches. ``str(report)`` is a table, and iterating gives the results.

    ``report["an-id"]`` is the result of one patch, also by a former id; a ``KeyError`` if the report has none of that id.
    """

    results: tuple[Result, ...]
    """One for each patch, in the order of the registry."""
    notes: tuple[str, ...] = ()
    """What concerns the process as a whole, one sentence each."""
    features: tuple[Result, ...] = ()
    """What features have changed at this moment, such as an open ``with patches.compile_options(...)``."""

    def __getitem__(self, patch_id: str) -> Result:
        for result in self.results:
            if patch_id in (result.id, *result.former_ids):
                return result
        raise KeyError(patch_id)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def with_status(self, *statuses: Status) -> tuple[Result, ...]:
        """Return the results that have one of ``statuses``."""
        return tuple(r for r in self.results if r.status in statuses)

    def to_dict(self) -> dict[str, Any]:
        """Return ``results`` and ``features`` as lists of :meth:`Result.to_dict`, and ``notes``."""
        features = [feature.to_dict() for feature in self.features]
        return {"results": [r.to_dict() for r in self.results], "notes": list(self.notes), "features": features}

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON, as ``python -m patches report --json`` prints it."""
        return json.dumps(self.to_dict(), indent=indent)

    def diff(self) -> str:
        """Return all changes in this process now, as one unified diff."""
        return "\n".join(c.diff for r in (*self.results, *self.features) for c in r.changes)

    def __str__(self) -> str:
        rows = []
        for result in self._sorted():
            why = [result.reason, f"without it: {result.summary}"] if result.status in _LOUD else [result.reason]
            rows.append(table.Row((str(result.status), result.id), why, result.status in _LOUD))
        return "\n".join([table.text(rows, self._total()), *map(table.wrapped, self._notes())])

    def _repr_html_(self) -> str:
        rows = [table.Row((str(r.status), r.id, r.reason), (r.summary,), r.status in _LOUD) for r in self._sorted()]
        notes = "".join(f"\n<p>{html.escape(note)}</p>" for note in self._notes())
        return table.as_html(("status", "patch", "why", "without it"), rows, self._total()) + notes

    def _sorted(self) -> list[Result]:
        return sorted(self.results, key=lambda result: _ORDER.index(result.status))

    def _total(self) -> str:
        return table.total([r.status for r in self.results], _ORDER)

    def _notes(self) -> list[str]:
        return [
            *(f"note: {r.id}: {n}" for r in self.results for n in r.notes),
            *(f"feature: {f.id}: {f.status}: {f.reason or f.summary}" for f in self.features),
            *(f"note: {n}" for n in self.notes),
        ]
