"""What the 4-bit dequantization of bitsandbytes does on a processor with AVX512F and on one without.

From ``csrc/cpu_ops.cpp`` (``dequantizeBlockwise4bitCpu``): with AVX512F, rows of whole vectors are taken to begin
with a block each, so that row ``i`` finds its scales from ``i * (columns // blocksize)`` on. Without, scales are
counted over the whole weight. One row is computed alike on all, and rightly: both kinds are put together from
calls of the kernel that the host has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

LANES = 16
FLOAT = 4  # bytes
KERNELS = [f"cdequantize_blockwise_cpu_{kind}_{dtype}" for kind in ("fp4", "nf4") for dtype in ("fp32", "bf16", "fp16")]


def kernels(library: ctypes.CDLL, present: bool) -> dict[str, Callable[..., None]]:
    """By their names in the native library, the kernels of a processor with or without AVX512F."""
    known = hasattr(library, "has_avx512f_cpu")  # older releases have one kernel for all
    return {name: _kernel(getattr(library, name), name, present) for name in KERNELS} if known else {}


def _kernel(native: Any, name: str, present: bool) -> Callable[..., None]:
    size = FLOAT if name.endswith("fp32") else 2

    def dequantize(codes: Any, absmax: Any, out: Any, blocksize: Any, rows: Any, columns: Any) -> None:
        m, n, block = rows.value, columns.value, blocksize.value
        if n % LANES or n % block == 0:
            native(codes, absmax, out, blocksize, rows, columns)
        elif not present:
            native(codes, absmax, out, blocksize, ctypes.c_longlong(1), ctypes.c_longlong(m * n))
        else:
            for i in range(m):
                native(
                    ctypes.c_void_p(codes.value + i * n // 2),
                    ctypes.c_void_p(absmax.value + i * (n // block) * FLOAT),
                    ctypes.c_void_p(out.value + i * n * size),
                    blocksize,
                    ctypes.c_longlong(1),
                    columns,
                )

    return dequantize
