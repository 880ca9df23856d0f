"""Memory that was freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

OFTEN = 2**22
"""Bytes of new packed weights after which it is worth the milliseconds that it takes."""

_made = 0


def quantized(packed: Tensor) -> None:
    """Called for the packed weights of each weight that was quantized: on a CPU, gives back what was freed meanwhile.

    The C library keeps it. Packed weights and statistics, which stay, lie between, and it would add up to the whole model.
    """
    global _made
    if packed.device.type == "cpu":
        _made += packed.nbytes
    if _made >= OFTEN:
        _made = 0
        with contextlib.suppress(OSError, AttributeError, TypeError):  # not the C library of GNU
            ctypes.CDLL(None).malloc_trim(0)
