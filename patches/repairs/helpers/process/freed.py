"""Memory that was freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes

OFTEN = 2**20
"""Bytes of new packed weights after which it is worth the milliseconds that it takes."""

_made = 0


def quantized(count: int) -> None:
    """Called for each weight that was quantized to ``count`` bytes on the CPU: gives back what was freed meanwhile.

    The C library keeps it. Packed weights and statistics, which stay, lie between, and it would add up to the whole model.
    """
    global _made
    _made += count
    if _made >= OFTEN:
        _made = 0
        with contextlib.suppress(OSError, AttributeError, TypeError):  # not the C library of GNU
            ctypes.CDLL(None).malloc_trim(0)
