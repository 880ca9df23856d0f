"""The two kernels of bitsandbytes that need AVX512-BF16, computed from the raw pointers.

They stand in for the processor, not for the library: every line of bitsandbytes' Python runs as it is, and so
does every other native function.

Layout of the packed weight, from ``csrc/cpu_ops.cpp`` (``tinygemm_kernel_nn``): tiles of 32 output rows;
in a tile, 32 bytes for each pair of input columns; the low nibble of byte ``j`` is row ``j // 2`` and
column ``j % 2`` of the pair, the high nibble the same 16 rows further down. Scales are bf16, shape
``(K / blocksize, N)``. Codes are rounded to bf16, products summed in fp32, one scale a block, the result
rounded to bf16. The order of the sums is not that of the instruction, so results agree with a real
processor to bf16 rounding, not bit by bit.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

TILE = 32

# The code books of the two formats, in the order of their 4-bit codes.
_FP4 = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
CODES = {
    "nf4": (
        -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ),
    "fp4": (*_FP4, *(-c for c in _FP4)),
}  # fmt: skip


def _at(pointer: ctypes.c_void_p, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The ``count`` numbers of ``dtype`` that lie at ``pointer``, not copied."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(pointer.value), dtype=dtype)


def unpack(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Codes ``(rows, columns)`` as uint8 from a packed weight of ``rows * columns / 2`` bytes."""
    tiles = packed.view(rows // TILE, columns // 2, 16, 2)
    codes = torch.stack((tiles & 15, tiles >> 4), dim=2)  # tile, pair, half, row, column of the pair
    return codes.permute(0, 2, 3, 1, 4).reshape(rows, columns)


def _gemv(kind: str) -> Any:
    book = torch.tensor(CODES[kind]).bfloat16().float()

    def gemv_4bit_inference(m, n, k, x, weight, absmax, out, blocksize, x_stride, out_stride) -> None:
        m, n, k, blocksize, x_stride, out_stride = (v.value for v in (m, n, k, blocksize, x_stride, out_stride))
        # The kernel would read past its operands, or abort the process.
        if n % TILE or k % blocksize:
            raise RuntimeError(f"the native kernel cannot compute {n} x {k} in blocks of {blocksize}")
        a = _at(x, (m - 1) * x_stride + k, torch.bfloat16).as_strided((m, k), (x_stride, 1)).float()
        codes = unpack(_at(weight, n * k // 2, torch.uint8), n, k)
        scales = _at(absmax, k // blocksize * n, torch.bfloat16).view(-1, n).float()
        blocks = book[codes.int()].view(n, -1, blocksize)
        parts = torch.einsum("mgb,ngb->mng", a.view(m, -1, blocksize), blocks)
        y = _at(out, (m - 1) * out_stride + n, torch.bfloat16).as_strided((m, n), (out_stride, 1))
        y.copy_((parts * scales.T).sum(-1))

    return gemv_4bit_inference


KERNELS = {f"gemv_4bit_inference_cpu_{kind}_bf16": _gemv(kind) for kind in CODES}
"""By their names in the native library."""
