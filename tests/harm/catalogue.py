"""Declaring programs, and the cases that the catalogue has on this stack."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patches.engine import gate

from . import programs
from .checks import Check
from .layers import BOTH, KINDS, Linear4bit, Quantized, quantized

Body = Callable[[Quantized], Iterator[Any]]


class _Handover:
    """What a program yields where another process may go on: one with the plugin, or one without it."""

    def __repr__(self) -> str:
        return "HANDOVER"


HANDOVER = _Handover()


@dataclass(frozen=True)
class Program:
    """One program: a generator function that is given a layer and yields its checks.

    Parameters
    ----------
    kinds:
        Which layers it is run on, names of :data:`.layers.KINDS`.
    when:
        PEP 508 requirements joined by " and ": on other releases bitsandbytes lacks what the program uses.
    packs:
        Whether it is about what an eval forward does where bitsandbytes repacks 4-bit weights: then it runs on a
        processor with AVX512-BF16 too (``"too"``), or there alone (``"only"``).
    compiles:
        It traces, compiles or exports: run last.
    hands_over:
        It yields :data:`HANDOVER` once, between writing and reading.
    may_raise:
        A pattern of the errors that it may end in with all patches. Without it, such an end is a fault: a slip in
        a program would else be an error before and after, and never seen.
    unrepaired:
        A defect of upstream that no patch claims to repair, in words, by the kinds of layer that have it: there, what
        is wrong may stay wrong.
    crashes:
        Unpatched, it takes the process with it where 4-bit weights are repacked, so that it is run in a fork there.
    """

    body: Body
    group: str
    kinds: tuple[str, ...]
    when: str
    packs: str
    compiles: bool
    hands_over: bool
    may_raise: str
    unrepaired: Mapping[str, str]
    crashes: bool
    devices: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.group}.{self.body.__name__}"


PROGRAMS: dict[str, Program] = {}


def program(
    *,
    kinds: Sequence[str] = BOTH,
    when: str = "",
    packs: str = "",
    compiles: bool = False,
    hands_over: bool = False,
    may_raise: str = "",
    unrepaired: Mapping[str, str] | None = None,
    crashes: bool = False,
    devices: Sequence[str] = ("cpu", "cuda"),
    **options: Any,
) -> Callable[[Body], Body]:
    """Put a program into the catalogue, see :class:`Program`. ``options`` are those of its layer."""
    assert packs in ("", "too", "only")

    def register(body: Body) -> Body:
        group = body.__module__.rpartition(".")[2]
        devices_ = ("cpu",) if packs == "only" else tuple(devices)
        made = Program(
            body,
            group,
            tuple(kinds),
            when,
            packs,
            compiles,
            hands_over,
            may_raise,
            unrepaired or {},
            crashes,
            devices_,
            options,
        )
        assert made.name not in PROGRAMS, f"two programs are named {made.name}"
        assert body.__doc__, f"{made.name} does not say what the user is doing"
        PROGRAMS[made.name] = made
        return body

    return register


@dataclass(frozen=True)
class Case:
    """A program on one kind of layer and one device."""

    program: Program
    kind: str
    device: str
    packed: bool
    """Whether this process has a processor on which bitsandbytes repacks."""

    @property
    def id(self) -> str:
        device = "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.program.name}[{self.kind}]{device}{'@avx512bf16' if self.packed else ''}"

    @property
    def group(self) -> str:
        """The cases of a group are judged together; a program that compiles is a group of its own."""
        return self.program.name if self.program.compiles else self.program.group

    @property
    def may_crash(self) -> bool:
        return self.program.crashes and self.packed

    def start(self) -> Iterator[Check | _Handover]:
        """The program, at its beginning, on a new layer."""
        return self.program.body(quantized(self.kind, self.device, **self.program.options))


def cases(devices: Sequence[str], packed: bool) -> list[Case]:
    """Every case that the installed releases and this processor have; those that compile come last."""
    for info in pkgutil.iter_modules(programs.__path__, programs.__name__ + "."):
        importlib.import_module(info.name)
    found = [
        Case(each, kind, device, packed)
        for each in PROGRAMS.values()
        if (each.packs if packed else each.packs != "only") and (not each.when or gate.satisfied(each.when))
        for kind in each.kinds
        if gate.satisfied(KINDS[kind].when) and (KINDS[kind].cls is Linear4bit or not packed)
        for device in each.devices
        if device in devices
    ]
    return sorted(found, key=lambda case: case.program.compiles)
