"""Memory that was freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BYTES_TO_TRIM = 2**25  # more than after the last time: then it is worth the milliseconds that it takes

_then = 0


def trim_after_quantizing(packed: Tensor) -> None:
    """Give memory back to the system after a weight was quantized to ``packed`` on a CPU.

    The C library keeps the memory of the original weights, because packed weights and statistics lie in between: it would
    add up to the whole model.
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
    """Return the bytes of memory that only this process has; 0 on systems other than Linux, which do not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = file.read().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
