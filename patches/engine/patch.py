"""What a patch is. Plain data."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from . import requirement

if TYPE_CHECKING:
    from .edits import Edit


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


class Feature(NamedTuple):
    """Edits that repair nothing: they are in while someone uses them. See ``Registry.hold``."""

    id: str
    summary: str
    edits: tuple[Edit, ...]


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
        Requirements (:mod:`patches.engine.requirement`) that must all hold for the defect to be
        there. The first names the package that is repaired.
    tested_up_to:
        The newest release of that package on which the defect was shown and repaired.
    edits:
        What is changed, see :mod:`patches.engine.edits`. An edit with ``when`` is for the releases
        that it names.
    defect:
        Runs the smallest organic case, offline, on a CPU, in about a second, and says whether
        the defect is there. Raises :class:`CannotShow` where the host cannot run it.
    seen_on:
        The series of torch on which it was shown by hand or in CI. One that a stack of the table has
        is named only if ``make stacks`` has shown it there.
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
    seen_on: tuple[str, ...] = ()
    damage: Callable[[], tuple[str, ...]] | None = None

    @property
    def package(self) -> str:
        """Name of the distribution that is repaired, the first of ``requires``."""
        return requirement.parse(self.requires[0]).name

    def damaged(self) -> tuple[str, ...]:
        """What :attr:`damage` says, or that it failed, which must not keep a patch out. Empty without one."""
        try:
            return () if self.damage is None else tuple(self.damage())
        except Exception as error:
            return (f"looking for what was damaged before failed: {type(error).__name__}: {error}",)


def unknown(patch_id: str, known: Iterable[str], kind: str = "patch") -> str:
    """The message for an id, or other name of a ``kind``, that does not exist."""
    near = difflib.get_close_matches(str(patch_id), list(known), n=3, cutoff=0.4)
    hint = f"the nearest: {', '.join(near)}" if near else "`python -m patches list` shows all"
    return f"no {kind} is named {patch_id!r}; {hint}"
