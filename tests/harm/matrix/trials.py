"""Which trials there are: the product, a slice of it, and random walks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product as every
from pathlib import Path
from zlib import crc32

from . import cover
from .changes import CHANGES
from .readers import READERS
from .states import STATES
from .subject import CORE, KINDS

FOUND = Path(__file__).with_name("found.txt")


@dataclass(frozen=True)
class Trial:
    """A layer of ``kind``, ``steps`` (states, changes and readers by name), the last of them a reader."""

    kind: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {' + '.join(self.steps)}"

    @classmethod
    def parse(cls, text: str) -> Trial:
        kind, _, steps = text.partition(": ")
        return cls(kind, tuple(steps.split(" + ")))


SLOW_STATES = ("compiled",)
OFFLOADED = ("on_cpu", "on_cpu_ran", "on_disk")


def _sense(state: str, change: str, reader: str) -> bool:
    if state in OFFLOADED and not CHANGES[change].offloaded:
        return False
    if (reader == "forward_tied") != (state == "tied") and reader == "forward_tied":
        return False
    return reader != "brought_back" or state in OFFLOADED


@cache
def product() -> tuple[Trial, ...]:
    """Every kind with every change, in states and before readers that rotate; the core kinds in every state, too."""
    found: dict[Trial, None] = {}
    states = [state for state in STATES if state not in SLOW_STATES]
    quick = [name for name, reader in READERS.items() if not reader.slow]
    for at, kind in enumerate(KINDS):
        changes = [change for change in CHANGES if cover.meant(kind, change)]
        for number, change in enumerate(changes):
            if kind not in CORE:
                for turn in range(6):
                    reader = quick[(7 * number + 11 * turn + at) % len(quick)]
                    _add(found, kind, states[(number + 3 * turn + at) % len(states)], change, reader)
                continue
            for other, reader in enumerate(READERS):
                for state in {"ran", states[(number + other) % len(states)]}:
                    _add(found, kind, state, change, reader)
            for turn, state in every(range(6), states):
                _add(found, kind, state, change, quick[(7 * number + 11 * turn + states.index(state)) % len(quick)])
            found[Trial(kind, ("compiled", change, "forward"))] = None
    return tuple(found)


def _add(found: dict[Trial, None], kind: str, state: str, change: str, reader: str) -> None:
    if reader == "forward_tied":
        state = "tied"
    elif reader == "brought_back":
        change = "nothing"
        state = "on_cpu_ran"
    elif not _sense(state, change, reader):
        state = "ran"
    found[Trial(kind, (state, change, reader))] = None


@cache
def named() -> tuple[Trial, ...]:
    """What was found wrong once."""
    lines = FOUND.read_text().splitlines()
    return tuple(Trial.parse(line) for line in lines if line and not line.startswith("#"))


@cache
def fixed_slice(layers: tuple[str, ...] = tuple(KINDS)) -> tuple[Trial, ...]:
    """What was found once; each of ``layers`` with each change, each change with each reader; each state."""
    found = dict.fromkeys(named())
    found |= {Trial(kind, steps): None for kind, steps in cover.cover(layers)}
    found |= {Trial(kind, (state, "nothing", "forward")): None for kind, state in every(CORE, cover.DAILY)}
    return tuple(found)


def share(number: int, of: int) -> tuple[Trial, ...]:
    """What was found once, and part ``number`` of ``of`` parts of the slice with one layer of each family."""
    found = named()
    return (*found, *(trial for trial in fixed_slice(cover.LAYERS)
                      if trial not in found and crc32(str(trial).encode()) % of == number))  # fmt: skip


def compiling() -> tuple[Trial, ...]:
    """What compiles, or writes a whole model, on what nothing was changed about."""
    slow = [name for name, reader in READERS.items() if reader.slow]
    return (
        *(Trial(kind, ("compiled", "nothing", "forward")) for kind in CORE),
        *(Trial(kind, ("ran", "nothing", reader)) for kind, reader in every(("int8", "nf4"), slow)),
    )


def walks(seed: int, count: int) -> tuple[Trial, ...]:
    """Random walks of three to six steps, each ended by a reader."""
    draw = random.Random(seed)
    kinds = [*CORE * 4, *KINDS]
    between = [name for name, reader in READERS.items() if not reader.last and not reader.slow]
    last = [
        name for name, reader in READERS.items() if not reader.slow and name not in ("forward_tied", "brought_back")
    ]
    states = [state for state in STATES if state not in (*SLOW_STATES, *OFFLOADED)]
    found = []
    for _ in range(count):
        kind = draw.choice(kinds)
        changes = [change for change in CHANGES if cover.meant(kind, change)]
        pools = draw.choices((changes, states, between), (5, 2, 2), k=draw.randint(2, 5))
        steps = [draw.choice(pool) for pool in pools]
        found.append(Trial(kind, (*steps, draw.choice(last))))
    return tuple(found)


def shorter(trial: Trial) -> Iterator[Trial]:
    """The same with one step fewer."""
    for at in range(len(trial.steps) - 1):
        yield Trial(trial.kind, (*trial.steps[:at], *trial.steps[at + 1 :]))
    if len(trial.steps) > 1 and trial.steps[-1] != "forward":
        yield Trial(trial.kind, (*trial.steps[:-1], "forward"))
