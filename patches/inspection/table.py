"""Show an inspection as a table, in the terminal and in a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..engine import table
from ..process.byte_sizes import format_bytes
from .records import Adapters, Asked, Checkpointing, Facts, Layers, OptimizerState, Place, Problem, Training

EXAMPLES = 3
_DTYPE = {"its input's": " dtype"}


class Inspection:
    """The findings of :func:`patches.inspect`: ``str()`` is a table, ``facts`` the data."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems of the model that no applied patch has repaired."""
        return tuple(problem for problem in self.facts.problems if not problem.repaired)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data: layers, training, optimizer, problems. Sizes are in bytes."""
        return asdict(self.facts)

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        return f"<inspection of {self.facts.model}: {_count(len(self.problems), 'problem')}>"

    def __str__(self) -> str:
        listed = (table.wrapped(f"{number}. {line}") for number, line in enumerate(self._sentences(), 1))
        return "\n".join([table.text(list(self._rows()), self._total()), *listed])

    def _repr_html_(self) -> str:
        shown = table.as_html(("", "what", "how many", "bytes", ""), self._rows(), self._total())
        rows = [
            table.Row((p.what, _names(p.where), p.remedy), (_patch(p),), not p.repaired) for p in self.facts.problems
        ]
        if not rows:
            return shown
        head = ("what goes wrong", "where", "what to do", "patch")
        return f"{shown}\n{table.as_html(head, rows, _count(len(self.problems), 'problem'))}"

    def _rows(self) -> Iterator[table.Row]:
        facts = self.facts
        if facts.asked is not None:
            yield _asked(facts.asked)
        yield from map(_layers, facts.layers)
        yield from map(_adapters, facts.adapters)
        yield from map(_place, facts.places)
        yield _training(facts.training)
        if facts.checkpointing is not None:
            yield _checkpointing(facts.checkpointing)
        if facts.optimizer is not None:
            yield _optimizer(facts.optimizer)

    def _total(self) -> str:
        layers = self.facts.layers
        elements = sum(line.parameters for line in layers)
        share = sum(line.parameters for line in layers if line.quantized) / max(1, elements)
        repaired = len(self.facts.problems) - len(self.problems)
        verb = "is" if repaired == 1 else "are"
        return (
            f"{self.facts.model}: {_count(sum(line.count for line in layers), 'layer')}, "
            f"{format_bytes(sum(line.bytes for line in layers))}, {elements:,} parameters, {share:.1%} of them quantized; "
            f"{_count(len(self.problems), 'problem')}" + (f", and {repaired} that {verb} repaired" if repaired else "")
        )

    def _sentences(self) -> Iterator[str]:
        for p in sorted(self.facts.problems, key=lambda problem: problem.repaired):
            yield " ".join(filter(None, [f"{p.what}{_where(p)}.", p.remedy, _patch(p)]))


# -- rows -------------------------------------------------------------------------------------------


def _layers(line: Layers) -> table.Row:
    facts = [
        line.quantized or f"not quantized: {line.reason}",
        "" if line.storage in (line.compute, line.quantized) else line.storage,
        line.compute if line.storage == line.compute else f"computes in {line.compute}{_DTYPE.get(line.compute, '')}",
        _places(line.devices, line.count),
        _places({f"offloaded to {where}": count for where, count in line.offloaded.items()}, line.count),
        f"scales {line.statistics}" if line.statistics else "",
        f"{line.tied} tied" if line.tied else "",
    ]
    return _row("layer", line.kind, line.count, line.bytes, facts)


def _place(line: Place) -> table.Row:
    facts = [
        f"{line.quantized} quantized",
        *(f"a forward brings {format_bytes(size)} to {runs}" for runs, size in line.brings.items()),
    ]
    return _row("place", line.where, line.layers, line.bytes, facts)


def _asked(line: Asked) -> table.Row:
    skip = "default skip list" if line.default_list else f"skip list (in place of the default): {_names(line.skip)}"
    facts = [
        skip,
        f"{line.skipped} of {line.of} linear layers are not quantized",
        f"compute dtype {line.compute}" if line.compute else f"threshold {line.threshold}",
        f"the rest: {_places(line.dtypes, 0)}",
    ]
    return _row("asked", f"load_in_{line.precision}", line.of - line.skipped, None, facts)


def _adapters(line: Adapters) -> table.Row:
    facts = [
        _places(line.dtypes, line.tensors),
        _places(line.devices, line.tensors),
        _share("active", "not active", line.active, line.count),
        _share("merged", "not merged", line.merged, line.count),
        _share("trains", "frozen", line.trainable, line.tensors),
    ]
    return _row("adapter", f"{line.kind} {line.name!r}", line.count, line.bytes, facts)


def _training(line: Training) -> table.Row:
    lacking = len(line.without_gradient)
    facts = [
        f"{line.parameters:,} parameters",
        f"outside of adapters: {_names(line.outside)}" if 0 < len(line.outside) < line.tensors else "",
        _places(line.dtypes, line.tensors),
        f"{line.gradients} have a gradient" if line.gradients else "no gradient now",
        f"{lacking} got none" if lacking else "",
        "modules: " + ", ".join(f"{count} in {mode}" for mode, count in line.modules.items()),
    ]
    return _row("training", "tensors that train", line.tensors, line.bytes, facts)


def _checkpointing(line: Checkpointing) -> table.Row:
    facts = [line.kind, f"idle: {line.idle}" if line.idle else "on"]
    return _row("training", "gradient checkpointing", line.layers, None, facts)


def _optimizer(line: OptimizerState) -> table.Row:
    few = f"; what has fewer than {line.smallest} elements stays in 32" if line.bits == 8 and line.smallest else ""
    facts = [
        f"asked for {line.bits} bits{few}" if line.bits else "",
        f"{line.stepped} have a state, {line.in_8_bits} of them in 8 bits or fewer" if line.stepped else "no step yet",
        ", ".join(f"{count} {dtype}" for dtype, count in line.dtypes.items()),
    ]
    return _row("optimizer", line.kind, line.tensors, line.bytes, facts)


def _row(section: str, what: str, count: int, number: int | None, facts: Iterable[str]) -> table.Row:
    cells = (section, what, f"{count:>5}", "" if number is None else f"{format_bytes(number):>9}")
    return table.Row(cells, ("; ".join(filter(None, facts)),))


# -- words ------------------------------------------------------------------------------------------


def _places(counts: Mapping[str, int], of: int) -> str:
    """Return "cpu", or "12 cpu, 4 cuda:0" where they are not all in one."""
    if len(counts) == 1 and set(counts.values()) == {of}:
        return next(iter(counts))
    return ", ".join(f"{count} {place}" for place, count in counts.items())


def _share(word: str, none: str, count: int, of: int) -> str:
    return word if count == of else f"{count} of {of} {word}" if count else none


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number or 'no'} {thing}s"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - EXAMPLES} more" if len(names) > EXAMPLES else ""
    return ", ".join(names[:EXAMPLES]) + more


def _where(problem: Problem) -> str:
    return f" ({_names(problem.where)})" if problem.where else ""


def _patch(problem: Problem) -> str:
    if not problem.patch:
        return ""
    here = "" if problem.status == "applied" else " here"
    return f"Patch {problem.patch} {problem.effect}; the patch is {problem.status}{here}."
