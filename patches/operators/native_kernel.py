"""The packed kernel of bitsandbytes, called in its native library, for :mod:`.packed_copies`. Imports torch.

The way there through torch's dispatcher takes longer than everything else around a product; without it, looking at
the contents of a weight before each product costs nothing more than upstream's way did.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor


def bind_kernel(
    packed: Tensor, scales: Tensor, book: Tensor, shape: tuple[int, ...], blocksize: int
) -> Callable[[Tensor], Tensor] | None:
    """Return the product with a packed weight, a function of contiguous bf16 rows; None if another kernel is in use."""
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.cextension import lib

    if getattr(ops, "gemm_4bit_forward_kernel", None) is not None:  # of the package ``kernels``
        return None
    kernel = getattr(lib, f"gemv_4bit_inference_cpu_{'fp4' if book[1] > 0 else 'nf4'}_bf16")
    outputs, columns = shape
    weight, absmax = ctypes.c_void_p(packed.data_ptr()), ctypes.c_void_p(scales.data_ptr())
    n, k, block = map(ctypes.c_int64, (outputs, columns, blocksize))

    def product(x: Tensor) -> Tensor:
        out = x.new_empty((*x.shape[:-1], outputs))
        rows = ctypes.c_int64(x.numel() // columns)
        source, target = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        kernel(rows, n, k, source, weight, absmax, target, block, k, n)
        return out

    return product
