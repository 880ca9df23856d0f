"""bitsandbytes' operators on the device: each is one kernel, that of the CPU.

A backend of bitsandbytes registers kernels for its device. This one takes what the release has for the CPU or for
every device; what it has for neither, and a GPU has, is computed here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_kept: list[torch.library.Library] = []
"""What a library registered is gone with it."""


def register(kind: str) -> None:
    """Give each operator of the imported bitsandbytes a kernel on ``kind``."""
    key = "CUDA" if kind == "cuda" else "PrivateUse1"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        library, _, operator = name.partition("::")
        if library == "bitsandbytes" and (has(name, "CPU") or has(name, "CompositeExplicitAutograd")):
            torch.ops.simulated.adopt(library, operator)
    if not has("bitsandbytes::int8_double_quant", "CompositeExplicitAutograd"):
        ours = torch.library.Library("bitsandbytes", "IMPL")
        ours.impl("int8_double_quant", int8_double_quant, key)
        _kept.append(ours)


@contextlib.contextmanager
def kernel(name: str) -> Iterator[None]:
    """What runs in here is one kernel."""
    torch.ops.simulated.begin_kernel(name)
    try:
        yield
    finally:
        torch.ops.simulated.end_kernel()


def int8_double_quant(A: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor | None, ...]:
    """Codes of ``A`` by rows and by columns, and the scales of both: training with ``has_fp16_weights`` needs it."""
    with kernel("bitsandbytes::int8_double_quant"):
        rows, row_scales, outliers = torch.ops.bitsandbytes.int8_vectorwise_quant(A.clone(), threshold=threshold)
        inliers = A.float()
        if outliers is not None and outliers.numel():
            inliers = inliers.index_fill(1, outliers.long(), 0.0)
        column_scales = inliers.abs().amax(0)
        columns = torch.round(inliers * (127.0 / column_scales.clamp_min(1e-12))).to(torch.int8)
        return rows, columns, row_scales, column_scales, outliers
