"""Operations that need all experts at once: they get them in floating point, are counted, and are said once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..process.messages import LOGGER

if TYPE_CHECKING:
    import torch

COUNTS: Counter[str] = Counter()
"""Name of the operation to how often it dequantized more than one expert at once, in this process."""
LARGEST: dict[str, int] = {}
"""Name of the operation to the most bytes that its experts took in floating point."""


def record_dense_operation(operation: str, experts: torch.Tensor) -> None:
    """Count ``operation`` on ``experts``; the first one of its name is logged, with its size."""
    if experts.dim() < 3:
        return
    COUNTS[operation] += 1
    LARGEST[operation] = max(LARGEST.get(operation, 0), experts.numel() * experts.element_size())
    if COUNTS[operation] == 1:
        LOGGER.warning(
            "%s needs all experts at once: while it runs, %d experts (%s, %s) are dequantized together, which takes %.1f MB. "
            "The result is right.",
            operation, experts.shape[0], tuple(experts.shape), str(experts.dtype).removeprefix("torch."),
            experts.numel() * experts.element_size() / 1e6,
        )  # fmt: skip


def dense_summary() -> str:
    """Each operation with its count and size; empty if no operation needed all experts."""
    return ", ".join(
        f"{name} ({count} {'time' if count == 1 else 'times'}, up to {LARGEST.get(name, 0) / 1e6:.1f} MB)"
        for name, count in COUNTS.items()
    )


def report_notes() -> tuple[str, ...]:
    """What the report of all patches says of it."""
    found = dense_summary()
    return (
        (f"operations in this process that dequantized all experts of a parameter at once: {found}",) if found else ()
    )
