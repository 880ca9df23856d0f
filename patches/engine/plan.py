"""Planning a change: from one state the next, and the steps between them. Nothing is written here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import CodeType
from weakref import ref

from .build import Builder
from .edits import Edit
from .frames import in_frames, named_in, nested
from .locate import Conflict, Replaced
from .report import Status
from .slots import CodeSlot, NameSlot, Slot, slots_of
from .state import Duty, Installed, Outcome, State
from .transaction import Stale, Step

NOT_FORGOTTEN = (
    "functions that torch.compile has compiled still run the old code: a thread is running compiled code, which cannot "
    "be discarded meanwhile. Call patches.report() or torch.compiler.reset() between two steps"
)


class Refused(Exception):
    """A place could not be written; the message says why."""


def outcome_of(error: Exception) -> Outcome:
    """What became of a patch that could not be put in."""
    if isinstance(error, Replaced):
        return Outcome(Status.SHADOWED, f"{error}; left as it is")
    if isinstance(error, Conflict):
        return Outcome(Status.CONFLICT, str(error))
    said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return Outcome(Status.FAILED, f"{said}; nothing was changed")


class Draft:
    """A state in the making. Every method leaves it whole; what cannot be done is returned, not half done."""

    def __init__(
        self, read: Callable[[], State], order: Mapping[str, int], builder: Builder, refused: Mapping[Hashable, str]
    ) -> None:
        """Of the state that ``read`` gives; planning ends in `Stale` once it gives another. ``order``: of the owners' edits;
        others come last. ``refused``: slots whose step failed in an earlier try, and why."""
        self._read = read
        self.before = state = read()
        # What the slots are in is held until the change is made: an address must not come to mean something else.
        places = {key: (known, known.slot.held()) for key, known in state.slots.items()}
        self._places = [place for _, place in places.values()]
        self.slots = {key: known for key, (known, place) in places.items() if place is not None}
        self.outcomes = dict(state.outcomes)
        self.waiting = dict(state.waiting)
        self.holders = dict(state.holders)
        self.duties = state.duties
        self.notes = state.notes
        self._order = order
        self._builder = builder
        self._refused = refused
        self._changed: frozenset[Hashable] | None = None

    @property
    def _shadowed(self) -> frozenset[Hashable]:
        """The slots in which someone else has put something since; read once, when it is first asked for."""
        if self._changed is None:
            self._changed = frozenset(key for key, known in self.before.slots.items() if known.shadowed)
        return self._changed

    # -- putting in ----------------------------------------------------------------------------

    def put_in(self, edits: Mapping[str, Sequence[Edit]]) -> tuple[list[str], dict[str, Exception]]:
        """Make the edits of each owner, all of an owner's or none.

        Returns the owners that had one to make, and those for whom it cannot be done with the reason.
        """
        failed: dict[str, Exception] = {}
        wanted: dict[str, list[tuple[Slot, Edit]]] = {}
        for owner, own in edits.items():
            try:
                wanted[owner] = self._resolved(owner, own)
            except (Conflict, Refused) as error:
                failed[owner] = error
        while True:
            slots, errors = self._with(wanted)
            if not errors:
                self.slots.update(slots)
                return [owner for owner, own in wanted.items() if own], failed
            failed |= errors
            wanted = {owner: own for owner, own in wanted.items() if owner not in errors}

    def _resolved(self, owner: str, edits: Sequence[Edit]) -> list[tuple[Slot, Edit]]:
        """The slots of ``edits`` in which ``owner`` has no edit yet."""
        pairs = [pair for edit in edits for pair in slots_of(edit)]
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

    def _with(
        self, wanted: Mapping[str, Sequence[tuple[Slot, Edit]]]
    ) -> tuple[dict[Hashable, Installed], dict[str, Exception]]:
        """The slots with all ``wanted`` edits in; or whose edits cannot be in, and why."""
        slots: dict[Hashable, Slot] = {}
        added: dict[Hashable, list[tuple[str, Edit]]] = {}
        for owner, pairs in wanted.items():
            for slot, edit in pairs:
                slots.setdefault(slot.key, slot)
                added.setdefault(slot.key, []).append((owner, edit))
        done: dict[Hashable, Installed] = {}
        errors: dict[str, Exception] = {}
        for key, slot in slots.items():
            if self._read() is not self.before:  # what others have changed meanwhile would look like conflicts
                raise Stale
            known = self.slots.get(key) or Installed(slot, slot.read(), (), None)
            try:
                done[key] = self._built_with(known, added[key])
            except Exception:
                if found := self._culprits(known, added[key]):
                    errors |= found
                else:  # what failed was no edit, and does not fail again
                    done[key] = self._built_with(known, added[key])
        return done, errors

    def _culprits(self, known: Installed, added: Sequence[tuple[str, Edit]]) -> dict[str, Exception]:
        """Adding owner after owner, those with whom it cannot be built."""
        errors: dict[str, Exception] = {}
        for owner in dict.fromkeys(name for name, _ in added):
            try:
                known = self._built_with(known, [(name, edit) for name, edit in added if name == owner])
            except Exception as error:
                errors[owner] = error
        return errors

    def _built_with(self, known: Installed, added: Sequence[tuple[str, Edit]]) -> Installed:
        edits = tuple(sorted((*known.edits, *added), key=lambda entry: self._order.get(entry[0], len(self._order))))
        return self._builder.with_edits(known, edits)

    # -- taking out ----------------------------------------------------------------------------

    def take_out(self, owners: Collection[str]) -> tuple[set[str], dict[str, Outcome]]:
        """Take out the edits of ``owners``. Returns who had one to take out, and what had to stay of whom.

        What someone else changed after us stays, and the rest of the owner goes; an owner of whom a place
        cannot be put back stays whole.
        """
        asked = set(owners)
        stuck = self._stuck(asked)
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
            self._leave(key, known, tuple(entry for entry in known.edits if entry[0] not in leaving))
            changed |= leaving
        return changed, problems

    def _stuck(self, owners: set[str]) -> dict[str, str]:
        """The ``owners`` with an edit that cannot leave its slot, each with the reason."""
        stuck: dict[str, str] = {}
        for key, known in self.slots.items():
            leaving = known.owners & owners
            if not leaving or key in self._shadowed:
                continue
            reason = self._kept_in(key, known, leaving)
            if reason:
                stuck |= dict.fromkeys(leaving, f"{known.slot.name} {reason}")
        return stuck

    def _kept_in(self, key: Hashable, known: Installed, leaving: Collection[str]) -> str:
        """Why the edits of ``leaving`` have to stay in a slot; empty if they need not."""
        if key in self._refused:
            return f"cannot be reverted: {self._refused[key]}"
        rest = tuple((owner, edit) for owner, edit in known.edits if owner not in leaving)
        if rest:
            try:
                self._builder.with_edits(known, rest)
            except Conflict as conflict:
                return f"cannot be reverted alone, because another patch changed the same function: {conflict}"
        return ""

    def _leave(self, key: Hashable, known: Installed, rest: tuple[tuple[str, Edit], ...]) -> None:
        if rest:
            self.slots[key] = self._builder.with_edits(known, rest)
        elif isinstance(known.slot, NameSlot):
            self.slots[key] = Installed(known.slot, known.original, (), known.value)
        else:
            del self.slots[key]

    def sweep(self) -> None:
        """Take out the names that nothing can use any more."""
        unused = {key: known.slot for key, known in self.slots.items() if not known.edits}
        idle = {key: (slot, id(vars(slot.held()))) for key, slot in unused.items() if isinstance(slot, NameSlot)}
        spaces: dict[int, set[str]] = {}
        for slot, space in idle.values():
            spaces.setdefault(space, set()).add(slot.attribute)
        used = in_frames(spaces)
        kept = named_in(in_use(self.before), {slot.attribute for slot, _ in idle.values()})
        for key, (slot, space) in idle.items():
            if slot.attribute not in kept and (space, slot.attribute) not in used:
                del self.slots[key]

    # -- what came of it -----------------------------------------------------------------------

    def owe(self, *duties: Duty) -> None:
        self.duties = (*self.duties, *(duty for duty in duties if duty not in self.duties))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes = (*self.notes, text)

    def fulfil_damage(self, found: Mapping[Duty, tuple[str, ...]]) -> None:
        """What was found damaged goes to the outcomes of the patches that are still in."""
        self.duties = tuple(duty for duty in self.duties if duty not in found)
        for duty, notes in found.items():
            outcome = self.outcomes.get(duty.owner)
            if notes and outcome is not None and outcome.status is Status.APPLIED:
                self.outcomes[duty.owner] = Outcome(outcome.status, outcome.reason, notes)

    def fulfil_compiled(self, said: str | None) -> None:
        """``said`` is None if compiled code could not be forgotten now: then it is to be tried again."""
        if said is None:
            self.note(NOT_FORGOTTEN)
            return
        self.duties = tuple(other for other in self.duties if other != Duty("compiled"))
        self.notes = tuple(note for note in self.notes if note != NOT_FORGOTTEN)
        if said:
            self.note(said)

    def conclude(self, owner: str, outcome: Outcome) -> None:
        self.outcomes[owner] = outcome

    def forget_refusal(self, owner: str) -> None:
        """Drop why an owner that has nothing in could not be put in then: it is not its state now."""
        if owner in self.outcomes and self.outcomes[owner].status is not Status.REVERTED:
            del self.outcomes[owner]

    def steps(self) -> list[Step]:
        """What leads from the state before to this one, names first."""
        steps = []
        for key in {**self.before.slots, **self.slots}:
            before, after = self.before.slots.get(key), self.slots.get(key)
            if before is not None and not before.slot.alive:  # and something else may have its address by now
                before = None
            known = before or after
            if before is after or known is None:
                continue
            old = known.original if before is None else before.value
            new = known.original if after is None else after.value
            if old is not new and key not in self._shadowed:  # what someone else has put there stays
                steps.append((known.slot.rank, known.slot.step(old, new)))
        return [step for _, step in sorted(steps, key=lambda pair: pair[0]) if step is not None]

    def state(self) -> State:
        return State(self.slots, self.outcomes, self.waiting, self.holders, self.duties, self._retired(), self.notes)

    def _retired(self) -> tuple[ref[CodeType], ...]:
        """Code that was reverted, by this change or before, and is alive, as long as there are names of it."""
        if all(known.edits for known in self.slots.values()):
            return ()
        alive = [code for code in self.before.retired if code() is not None]
        reverted = [ref(part) for code in self._reverted() for part in nested(code)]
        return (*alive, *reverted)

    def _reverted(self) -> Iterator[CodeType]:
        """The code that this change takes out of the places where we had put it."""
        for key, known in self.before.slots.items():
            if isinstance(known.value, CodeType) and (
                key not in self.slots or self.slots[key].value is not known.value
            ):
                yield known.value


def in_use(state: State) -> Iterator[CodeType]:
    """Code of ours, or made of it, that lives on where we did not put it, or where we have reverted it.

    Any holder of a code object may run it: a copy of the function, a generator, a profiler that will put it back. And
    a tracer puts code of its own, made of ours, where ours was.
    """
    for retired in state.retired:
        if (code := retired()) is not None:
            yield code
    for known in state.slots.values():
        if isinstance(known.slot, CodeSlot) and known.shadowed:
            yield known.value
            if (code := known.slot.read()) is not None:
                yield code
