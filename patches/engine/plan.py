"""Planning a change: the next state, and the writes that lead to it. Nothing is written here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import CodeType
from weakref import ref

from . import idle_names
from .build import Builder
from .edits import Edit
from .frames import with_nested_code
from .function_source import Conflict, Replaced
from .report import Status
from .slots import NameSlot, Slot, slots_of
from .state import FollowUp, Installed, Outcome, State
from .transaction import Stale, Step

NOT_FORGOTTEN = (
    "functions that torch.compile has compiled still run the old code, because a thread is running compiled code now, and "
    "it cannot be discarded meanwhile. Call patches.report() or torch.compiler.reset() between two training steps"
)


class Refused(Exception):
    """A place could not be written; the message says why."""


def outcome_of(error: Exception) -> Outcome:
    """Say why a patch could not be put in."""
    if isinstance(error, Replaced):
        return Outcome(Status.SHADOWED, f"{error}; left as it is")
    if isinstance(error, Conflict):
        return Outcome(Status.CONFLICT, str(error))
    said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return Outcome(Status.FAILED, f"{said}; nothing was changed")


class Draft:
    """The next state, in the making.

    An owner is a part of a patch, or a feature. Its edits go in all together or not at all: a method that fails for an
    owner leaves it out, and returns it with the reason.
    """

    def __init__(
        self, read: Callable[[], State], order: Mapping[str, int], builder: Builder, refused: Mapping[Hashable, str]
    ) -> None:
        """Begin with the current state.

        Parameters
        ----------
        read:
            Returns the current state. As soon as it returns another one, planning raises ``Stale``.
        order:
            The position of each owner: in one function the edits of the first owner are made first. Owners that are
            not named come last.
        refused:
            Slots that could not be written in an earlier attempt, each with the reason.
        """
        self._read = read
        self.before = state = read()
        # Hold every place until the change is made, so that no other object gets its address meanwhile.
        places = {key: (known, known.slot.held()) for key, known in state.slots.items()}
        self._kept_alive = [place for _, place in places.values()]
        self.slots = {key: known for key, (known, place) in places.items() if place is not None}
        self.outcomes = dict(state.outcomes)
        self.waiting = dict(state.waiting)
        self.follow_ups = state.follow_ups
        self.notes = state.notes
        self._order = order
        self._builder = builder
        self._refused = refused
        self._shadowed_keys: frozenset[Hashable] | None = None

    @property
    def _shadowed(self) -> frozenset[Hashable]:
        """The slots that another program has changed after us; read once."""
        if self._shadowed_keys is None:
            self._shadowed_keys = frozenset(key for key, known in self.before.slots.items() if known.shadowed)
        return self._shadowed_keys

    # -- putting in ----------------------------------------------------------------------------

    def put_in(self, edits: Mapping[str, Sequence[Edit]]) -> tuple[list[str], dict[str, Exception]]:
        """Make the edits of each owner.

        Returns the owners whose edits were made (without those who had them all in), and the owners whose edits cannot
        be made, each with the error.
        """
        failed: dict[str, Exception] = {}
        wanted: dict[str, list[tuple[Slot, Edit]]] = {}
        for owner, own in edits.items():
            try:
                wanted[owner] = self._edits_to_add(owner, own)
            except (Conflict, Refused) as error:
                failed[owner] = error.with_traceback(None)
        while True:
            built, errors = self._build_all(wanted)
            if not errors:
                self.slots.update(built)
                return [owner for owner, own in wanted.items() if own], failed
            failed |= errors  # and once more without these owners
            wanted = {owner: own for owner, own in wanted.items() if owner not in errors}

    def _edits_to_add(self, owner: str, edits: Sequence[Edit]) -> list[tuple[Slot, Edit]]:
        """Find the slots of ``edits`` in which ``owner`` has no edit yet."""
        pairs = [pair for edit in edits for pair in slots_of(edit, self.before)]
        if not pairs:
            raise Conflict("the patch has no edit for this release")
        fresh = []
        for slot, edit in pairs:
            known = self.slots.get(slot.key)
            if known is not None and owner in known.owners:
                continue
            if slot.key in self._shadowed:
                raise Conflict(f"{slot.name}: another program changed it after the patch was applied")
            if slot.key in self._refused:
                raise Refused(self._refused[slot.key])
            fresh.append((slot, edit))
        return fresh

    def _build_all(
        self, wanted: Mapping[str, Sequence[tuple[Slot, Edit]]]
    ) -> tuple[dict[Hashable, Installed], dict[str, Exception]]:
        """Build each slot of ``wanted`` with the edits of all its owners; return also the owners that do not fit."""
        slots: dict[Hashable, Slot] = {}
        added: dict[Hashable, list[tuple[str, Edit]]] = {}
        for owner, pairs in wanted.items():
            for slot, edit in pairs:
                slots.setdefault(slot.key, slot)
                added.setdefault(slot.key, []).append((owner, edit))
        built: dict[Hashable, Installed] = {}
        errors: dict[str, Exception] = {}
        for key, slot in slots.items():
            if self._read() is not self.before:  # a change by another thread would look like a conflict
                raise Stale
            known = self.slots.get(key) or Installed(slot, slot.read(), (), None)
            try:
                built[key] = self._build(known, added[key])
            except Exception:
                pass  # what is raised in this handler would keep this error, and with its frames reverted code, alive
            if key not in built:
                if unfit := self._unfit_owners(known, added[key]):
                    errors |= unfit
                else:  # each owner fits alone, so something else failed: a second error is raised
                    built[key] = self._build(known, added[key])
        return built, errors

    def _unfit_owners(self, known: Installed, added: Sequence[tuple[str, Edit]]) -> dict[str, Exception]:
        """Add the edits of one owner after the other; return the owners whose edits do not fit, with the error."""
        errors: dict[str, Exception] = {}
        for owner in dict.fromkeys(name for name, _ in added):
            try:
                known = self._build(known, [(name, edit) for name, edit in added if name == owner])
            except Exception as error:
                errors[owner] = error.with_traceback(None) if isinstance(error, Conflict) else error
        return errors

    def _build(self, known: Installed, added: Sequence[tuple[str, Edit]]) -> Installed:
        """Add the edits ``added`` to ``known``, in the order of their owners."""
        edits = tuple(sorted((*known.edits, *added), key=lambda entry: self._order.get(entry[0], len(self._order))))
        return self._builder.with_edits(known, edits, self.before)

    # -- taking out ----------------------------------------------------------------------------

    def take_out(self, owners: Collection[str]) -> tuple[set[str], dict[str, Outcome]]:
        """Take out the edits of ``owners``.

        A slot that another program has changed after us stays as it is; the other slots of its owners are restored.
        If a slot cannot be restored, its owners keep all their edits. Returns the owners of whom something was taken
        out, and the outcome of each owner of whom something had to stay.
        """
        asked = set(owners)
        stuck = self._owners_that_stay(asked)
        problems = {owner: Outcome(Status.APPLIED, reason) for owner, reason in stuck.items()}
        changed: set[str] = set()
        for key, known in list(self.slots.items()):
            leaving = known.owners & asked - stuck.keys()
            if not leaving:
                continue
            if key in self._shadowed:
                reason = f"{known.slot.name} was changed by another program after the patch was applied; left as it is"
                problems |= {owner: Outcome(Status.SHADOWED, reason) for owner in leaving}
                continue
            self._keep_only(key, known, tuple(entry for entry in known.edits if entry[0] not in leaving))
            changed |= leaving
        return changed, problems

    def _owners_that_stay(self, owners: set[str]) -> dict[str, str]:
        """Return the ``owners`` with an edit that cannot leave its slot, each with the reason."""
        stuck: dict[str, str] = {}
        for key, known in self.slots.items():
            leaving = known.owners & owners
            if not leaving or key in self._shadowed:
                continue
            reason = self._reason_to_keep(key, known, leaving)
            if reason:
                stuck |= dict.fromkeys(leaving, f"{known.slot.name} {reason}")
        return stuck

    def _reason_to_keep(self, key: Hashable, known: Installed, leaving: Collection[str]) -> str:
        """Say why the edits of ``leaving`` have to stay in a slot; empty if they need not."""
        if key in self._refused:
            return f"cannot be reverted: {self._refused[key]}"
        rest = tuple((owner, edit) for owner, edit in known.edits if owner not in leaving)
        if rest:
            try:
                self._builder.with_edits(known, rest, self.before)
            except Conflict as conflict:
                return f"cannot be reverted alone, because another patch changed the same function: {conflict}"
        return ""

    def _keep_only(self, key: Hashable, known: Installed, rest: tuple[tuple[str, Edit], ...]) -> None:
        """Let a slot have the edits ``rest`` alone. Without any it is restored, but a global name stays until no code uses it."""
        if rest:
            self.slots[key] = self._builder.with_edits(known, rest, self.before)
        elif isinstance(known.slot, NameSlot):
            self.slots[key] = Installed(known.slot, known.original, (), known.value)
        else:
            del self.slots[key]

    def sweep(self) -> None:
        """Take out the names that no code needs any more."""
        for key in idle_names.unused(self.before, self.slots) - self._refused.keys():
            del self.slots[key]

    # -- what came of it -----------------------------------------------------------------------

    def add_follow_up(self, *follow_ups: FollowUp) -> None:
        """Note ``follow_ups``, to be done after the change."""
        self.follow_ups = (*self.follow_ups, *(new for new in follow_ups if new not in self.follow_ups))

    def note(self, text: str) -> None:
        """Add a sentence to every later report, once."""
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def record_damage(self, found: Mapping[FollowUp, tuple[str, ...]]) -> None:
        """Add what was ``found`` damaged to the outcomes of the patches that are still in."""
        self.follow_ups = tuple(other for other in self.follow_ups if other not in found)
        for scan, notes in found.items():
            outcome = self.outcomes.get(scan.owner)
            if notes and outcome is not None and outcome.status is Status.APPLIED:
                self.outcomes[scan.owner] = Outcome(outcome.status, outcome.reason, notes)

    def record_compiled_discarded(self, said: str | None) -> None:
        """Record whether compiled code was discarded; ``said``: a note or nothing to report, None if it must be tried again."""
        if said is None:
            self.note(NOT_FORGOTTEN)
            return
        self.follow_ups = tuple(other for other in self.follow_ups if other != FollowUp("compiled"))
        self.notes = tuple(note for note in self.notes if note != NOT_FORGOTTEN)
        if said:
            self.note(said)

    def set_outcome(self, owner: str, outcome: Outcome) -> None:
        """Note the ``outcome`` of an owner."""
        self.outcomes[owner] = outcome

    def clear_failed_outcome(self, owner: str) -> None:
        """Drop an earlier failure of an owner: nothing of it is in now."""
        if owner in self.outcomes and self.outcomes[owner].status is not Status.REVERTED:
            del self.outcomes[owner]

    def steps(self) -> list[Step]:
        """Return the writes that lead from the state before to this one, names first."""
        steps = []
        for key in {**self.before.slots, **self.slots}:
            before, after = self.before.slots.get(key), self.slots.get(key)
            if before is not None and not before.slot.alive:  # another object may have its address by now
                before = None
            known = before or after
            if before is after or known is None:
                continue
            old = known.original if before is None else before.value
            new = known.original if after is None else after.value
            if old is not new and key not in self._shadowed:  # what someone else has put there stays
                steps.append((known.slot.write_order, known.slot.step(old, new)))
        return [step for _, step in sorted(steps, key=lambda pair: pair[0]) if step is not None]

    def state(self) -> State:
        """Return the state that was planned."""
        retired, libraries = self._retired(), self.before.libraries
        return State(self.slots, self.outcomes, self.waiting, self.follow_ups, retired, self.notes, libraries)

    def _retired(self) -> tuple[ref[CodeType], ...]:
        """Return weak references to code that was reverted or replaced, is alive, and may use names that are not removed yet."""
        alive = tuple(code for code in self.before.retired if code() is not None)
        reverted = [ref(part) for code in self._reverted() for part in with_nested_code(code)]
        return (*alive, *reverted)

    def _reverted(self) -> Iterator[CodeType]:
        """Give the code that this change takes out of the places where we had put it, to restore or to replace it."""
        stays = {id(known.value) for known in self.slots.values()}  # a module that is imported anew gets the same code
        for known in self.before.slots.values():
            if isinstance(known.value, CodeType) and id(known.value) not in stays and known.slot.alive:
                yield known.value
