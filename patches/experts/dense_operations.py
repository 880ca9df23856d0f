"""Operations that need all experts at once: they get them in floating point, are counted, and are said once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..process.messages import LOGGER

if TYPE_CHECKING:
    import torch

COUNTS: Counter[str] = Counter()
"""How often each operation dequantized more than one expert at once in this process, by its name."""
_LARGEST: dict[str, int] = {}
"""The most bytes in floating point that the experts of each operation took."""


def record_dense_operation(operation: str, experts: torch.Tensor) -> None:
    """Count ``operation`` on ``experts``; the first one of its name is logged, with its size."""
    if experts.dim() < 3:
        return
    size = experts.numel() * experts.element_size()
    COUNTS[operation] += 1
    _LARGEST[operation] = max(_LARGEST.get(operation, 0), size)
    if COUNTS[operation] == 1:
        shown = f"{tuple(experts.shape)}, {str(experts.dtype).removeprefix('torch.')}"
        LOGGER.warning(
            "%s needs all experts at once: while it runs, %d experts (%s) are dequantized together, which takes %.1f MB. "
            "The result is right.",
            operation,
            experts.shape[0],
            shown,
            size / 1e6,
        )


def dense_summary() -> str:
    """Name each operation with its count and size; empty if no operation needed all experts."""
    return ", ".join(
        f"{name} ({count} {'time' if count == 1 else 'times'}, up to {_LARGEST.get(name, 0) / 1e6:.1f} MB)"
        for name, count in COUNTS.items()
    )


def report_notes() -> tuple[str, ...]:
    """Return the line for the report of all patches, if there is one."""
    found = dense_summary()
    note = f"operations in this process that dequantized all experts of a parameter at once: {found}"
    return (note,) if found else ()
