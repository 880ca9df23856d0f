"""What a patch is, and what became of it. Plain data: this module knows nothing of the rest."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .edits import Edit


class Status(str, enum.Enum):
    """Where a patch stands in this process."""

    PENDING = "pending"
    """A module it edits is not imported yet; it is applied right after that import."""
    AVAILABLE = "available"
    """It fits what is installed and imported, and nobody has applied it yet."""
    NOT_INSTALLED = "not installed"
    """A package it repairs is absent."""
    NOT_AFFECTED = "not affected"
    """The installed release is outside the range that has the defect."""
    UNTESTED = "untested"
    """The installed release is newer than any the patch was tested on: left alone unless asked."""
    DISABLED = "disabled"
    """Switched off by ``PATCHES_DISABLE``."""
    APPLIED = "applied"
    REVERTED = "reverted"
    CONFLICT = "conflict"
    """The installed source is not the one the patch was written for; nothing was changed."""
    SHADOWED = "shadowed"
    """Someone else changed the same place, before us or after; it is left as they made it."""
    FAILED = "failed"
    """Applying it raised; every change it had made was undone."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Finding:
    """The answer of a reproducer: is the defect there, and by how much.

    ``figure`` is what was measured, in words with a unit ("relative error 1.42",
    "8 of 12 gradients missing"), for the table that ``python -m patches verify`` prints.
    """

    present: bool
    figure: str = ""

    def __bool__(self) -> bool:
        return self.present


class CannotShow(Exception):
    """Raised by a ``defect()`` that this host cannot run, with the reason in words.

    For what a user's program cannot reach here (a processor without AVX512-BF16, say);
    never for a reproducer that is merely inconvenient.
    """


@dataclass(frozen=True)
class Patch:
    """One defect of one package: who has it, what repairs it, and how to see it.

    Parameters
    ----------
    id:
        Unique, lower case, words joined by hyphens, beginning with the repaired package.
    summary:
        One line, what goes wrong for the user without it.
    links:
        Upstream issues and pull requests.
    requires:
        PEP 508 requirements that must all hold for the defect to be there. The first names
        the package that is repaired.
    tested_up_to:
        The newest release of that package on which the defect was shown and repaired.
    edits:
        What is changed, see :mod:`patches.edits`. An edit with ``when`` is for the releases
        that it names.
    defect:
        Runs the smallest organic case, offline, on a CPU, in about a second, and says whether
        the defect is there. Raises :class:`CannotShow` where the host cannot run it.
    seen_on:
        The torch releases on which it was run by hand or in CI.
    damage:
        Names, in words, objects alive in this process that the defect had already damaged when
        the patch was applied. Runs once, right after it is applied; changes nothing.
    """

    id: str
    summary: str
    links: tuple[str, ...]
    requires: tuple[str, ...]
    tested_up_to: str
    edits: tuple[Edit, ...]
    defect: Callable[[], Finding]
    seen_on: tuple[str, ...] = ("2.8", "2.13", "2.14")
    damage: Callable[[], tuple[str, ...]] | None = None

    @property
    def package(self) -> str:
        """Name of the distribution that is repaired, the first of ``requires``."""
        from packaging.requirements import Requirement

        return Requirement(self.requires[0]).name


@dataclass(frozen=True)
class Change:
    """One place that a patch changed: the dotted target, and the change as a unified diff."""

    target: str
    render: Callable[[], str] = field(repr=False, compare=False)

    @cached_property
    def diff(self) -> str:
        """Made when it is first asked for: most reports are read for their states only."""
        return self.render()


@dataclass(frozen=True)
class Result:
    """What became of one patch, and why."""

    id: str
    summary: str
    status: Status
    reason: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "summary": self.summary,
            "status": str(self.status),
            "reason": self.reason,
            "versions": dict(self.versions),
            "changes": [{"target": c.target, "diff": c.diff} for c in self.changes],
            "notes": list(self.notes),
            "links": list(self.links),
        }


@dataclass(frozen=True)
class Report:
    """The state of every patch. ``str(report)`` is a table, ``report.diff()`` a unified diff."""

    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, patch_id: str) -> Result:
        for result in self.results:
            if result.id == patch_id:
                return result
        raise KeyError(patch_id)

    def __iter__(self):
        return iter(self.results)

    def with_status(self, *statuses: Status) -> tuple[Result, ...]:
        """The results that have one of ``statuses``."""
        return tuple(r for r in self.results if r.status in statuses)

    def to_dict(self) -> dict[str, Any]:
        return {"results": [r.to_dict() for r in self.results], "notes": list(self.notes)}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def diff(self) -> str:
        """Everything that is changed in this process now, as one unified diff."""
        return "\n".join(c.diff for r in self.results for c in r.changes)

    def __str__(self) -> str:
        from .table import render

        rows = [(r.id, str(r.status), r.reason or r.summary) for r in self.results]
        lines = [render(("patch", "status", "why"), rows)]
        lines += [f"note: {r.id}: {n}" for r in self.results for n in r.notes]
        lines += [f"note: {n}" for n in self.notes]
        return "\n".join(lines)
