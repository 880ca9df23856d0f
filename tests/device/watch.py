"""What the device does: kernels, copies and waits, and the memory that it holds."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class Events:
    """What happened inside :func:`watch`, in order, each with the number of bytes that were copied."""

    log: list[tuple[str, int]] = field(default_factory=list)

    @property
    def kernels(self) -> list[str]:
        """Names of the operators, in order."""
        return [what.removeprefix("kernel ") for what, _ in self.log if what.startswith("kernel ")]

    @property
    def copies(self) -> list[tuple[str, int]]:
        """Copies between host and device or between devices: "host to device", and the bytes."""
        return [(what.removeprefix("copy "), size) for what, size in self.log if what.startswith("copy ")]

    @property
    def waits(self) -> list[str]:
        """Where the host stood still until the device had come so far, and why."""
        return [what.removeprefix("wait ") for what, _ in self.log if what.startswith("wait ")]

    def count(self) -> Counter[str]:
        """How often each thing happened, whatever the order."""
        return Counter(what for what, _ in self.log)

    def more_than(self, other: Events) -> dict[str, int]:
        """What happened here that did not happen there: {} if nothing did."""
        return dict(self.count() - other.count())

    def moved(self, direction: str) -> int:
        """Bytes copied in one direction, such as "host to device"."""
        return sum(size for what, size in self.copies if what == direction)


@contextlib.contextmanager
def watch() -> Iterator[Events]:
    """Log what every device does in here, in all threads."""
    seen = Events()
    torch.ops.simulated.take_log()
    torch.ops.simulated.open_log(True)
    try:
        yield seen
    finally:
        torch.ops.simulated.open_log(False)
        seen.log = list(zip(*torch.ops.simulated.take_log()))


def held(index: int = 0) -> int:
    """Bytes that tensors hold on the device, garbage collected first."""
    gc.collect()
    return torch.ops.simulated.memory(index)


@contextlib.contextmanager
def limited_to(size: int, index: int = 0) -> Iterator[None]:
    """Give the device ``size`` bytes beside what it holds: one more raises ``torch.OutOfMemoryError``."""
    before = torch.ops.simulated.limit(index)
    torch.ops.simulated.set_limit(index, held(index) + size)
    try:
        yield
    finally:
        torch.ops.simulated.set_limit(index, before)


@contextlib.contextmanager
def peak(index: int = 0) -> Iterator[list[int]]:
    """How much more than at the beginning the device held at most: one number, there after the block."""
    before, result = held(index), []
    torch.ops.simulated.reset_peak(index)
    yield result
    result.append(torch.ops.simulated.peak(index) - before)
