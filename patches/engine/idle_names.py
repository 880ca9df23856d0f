"""Names that reverted code needs: which are still used, and by whom."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from types import CodeType

from . import frames
from .slots import CodeSlot, NameSlot
from .state import Installed, State


def in_use(state: State) -> Iterator[CodeType]:
    """Give the code of ours that others still hold: after it was reverted, or after they put other code in its place.

    A copy of the function, a generator, or a profiler that will put it back may still run it. The code that a tracer
    has made of ours, and put where ours was, is given too.
    """
    for retired in state.retired:
        if (code := retired()) is not None:
            yield code
    for known in state.slots.values():
        if isinstance(known.slot, CodeSlot) and known.shadowed:
            yield known.value
            if (code := known.slot.read()) is not None:
                yield code


def unused(state: State, slots: Mapping[Hashable, Installed]) -> set[Hashable]:
    """Return those of ``slots`` whose names no code needs any more; ``state`` is the state of the process now."""
    idle = {key: known.slot for key, known in slots.items() if not known.edits}
    names = {key: (slot, id(vars(slot.held()))) for key, slot in idle.items() if isinstance(slot, NameSlot)}
    by_globals: dict[int, set[str]] = {}
    for slot, space in names.values():
        by_globals.setdefault(space, set()).add(slot.attribute)
    running = frames.names_in_frames(by_globals)
    held = frames.names_in_code(in_use(state), {slot.attribute for slot, _ in names.values()})
    return {
        key
        for key, (slot, space) in names.items()
        if slot.attribute not in held and (space, slot.attribute) not in running
    }


def describe(state: State) -> Iterator[str]:
    """Say for the report which names had to stay when their patches were reverted, and what needs them."""
    idle = [known.slot for known in state.slots.values() if not known.edits and known.slot.alive]
    if not idle:
        return
    names = {slot.attribute for slot in idle if isinstance(slot, NameSlot)}
    codes = [code for code in in_use(state) if frames.names_in_code([code], names)]
    spaces = {id(module): vars(module) for slot in idle if (module := slot.held()) is not None}
    who = (
        ", ".join(frames.functions_with_code(codes, spaces.values())) or "a frame, a generator or a tool that keeps it"
    )
    yield (
        f"{who} still runs code of reverted patches, so the names that this code uses stay: "
        f"{', '.join(sorted(s.name for s in idle))}. Once the code has ended, patches.report(), apply() or revert() "
        "removes these names"
    )
