"""Memory that was freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BYTES_TO_TRIM = 2**25
"""Bytes that the process has more than after the last time: then it is worth the milliseconds that it takes."""

_then = 0


def trim_after_quantizing(packed: Tensor) -> None:
    """Called for the packed weights of each weight that was quantized: on a CPU, gives back what was freed meanwhile.

    The C library keeps it. Packed weights and statistics, which stay, lie between, and it would add up to the whole model.
    """
    global _then
    if packed.device.type != "cpu":
        return
    now = _private()
    _then = min(_then, now)
    if now - _then >= BYTES_TO_TRIM:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # not the C library of GNU
            ctypes.CDLL(None).malloc_trim(0)
        _then = _private()


def _private() -> int:
    """Bytes of memory that are this process's own; 0 where the system does not say, which is no Linux."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = file.read().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
