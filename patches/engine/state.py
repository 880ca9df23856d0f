"""What the registry knows: one immutable snapshot, swapped whole by :mod:`.transaction`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

from .edits import Edit
from .libraries import IMPORTED, Libraries
from .report import Status
from .targets import raw_attribute

if TYPE_CHECKING:
    from .slots import Slot


@dataclass(frozen=True, eq=False)
class Installed:
    """What stands in a slot: the original, the active edits in order with their owners, and what they made.

    A name without edits is one that was reverted, and stays while code that uses it is alive.
    """

    slot: Slot
    original: Any
    edits: tuple[tuple[str, Edit], ...]
    value: Any

    @property
    def shadowed(self) -> bool:
        """Whether someone else has put something there since."""
        return self.slot.alive and self.slot.read() is not self.value

    @property
    def owners(self) -> set[str]:
        return {owner for owner, _ in self.edits}


class Outcome(NamedTuple):
    """What cannot be read from the process: why a patch is not in it, or what was found when it went in."""

    status: Status
    reason: str = ""
    notes: tuple[str, ...] = ()


class FollowUp(NamedTuple):
    """A task that a change leaves to be done after it; it stays until it was done, also after an interrupt."""

    kind: str
    """``"damage"``: look for what the defect had damaged; ``"compiled"``: have compiled code forgotten."""
    owner: str = ""


@dataclass(frozen=True, eq=False)
class State:
    slots: Mapping[Hashable, Installed] = field(default_factory=dict)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    waiting: Mapping[str, bool] = field(default_factory=dict)
    """Patches that follow an import, and whether on untested releases too."""
    follow_ups: tuple[FollowUp, ...] = ()
    retired: tuple[ref[CodeType], ...] = field(default=(), repr=False)
    """Code that was reverted, or replaced by that of more patches, and may use names that are there; held weakly, for others may have it."""
    notes: tuple[str, ...] = ()
    libraries: Libraries = IMPORTED
    """Where the slots are."""

    def original_code(self, function: FunctionType) -> CodeType:
        """Return the code that ``function`` had before us, or has now if another program has changed it since."""
        known = self.slots.get(("code", id(function)))
        ours = known is not None and known.slot.held() is function and known.value is function.__code__
        return known.original if known is not None and ours else function.__code__

    def original_attribute(self, holder: Any, attribute: str) -> Any:
        """Return the value that an attribute had before us, or has now if another program has changed it since."""
        raw = raw_attribute(holder, attribute)
        known = self.slots.get(("attribute", id(holder), attribute))
        ours = known is not None and known.slot.held() is holder and known.value is raw
        return known.original if known is not None and ours else raw

    @property
    def active(self) -> Mapping[str, Sequence[Installed]]:
        """The slots in which an owner has an edit, by owner, but for places that are gone."""
        if "_active" not in vars(self):  # no cached_property: before Python 3.12 it holds a lock, also across a fork
            found: dict[str, list[Installed]] = {}
            for installed in filter(attrgetter("slot.alive"), self.slots.values()):
                for owner in dict.fromkeys(owner for owner, _ in installed.edits):
                    found.setdefault(owner, []).append(installed)
            vars(self)["_active"] = found
        return cast("Mapping[str, Sequence[Installed]]", vars(self)["_active"])

    @property
    def idle_names(self) -> bool:
        """Whether names that were reverted are still there, or slots of places that are gone."""
        return not all(installed.edits and installed.slot.alive for installed in self.slots.values())
