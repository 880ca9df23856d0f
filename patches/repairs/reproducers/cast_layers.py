"""A layer that torchao has quantized and that is cast afterwards: what the reproducers about its dtype measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...engine import Finding, Message

TWO_DTYPES = (
    Message(
        "self and mat2 must have the same dtype, but got Float and BFloat16",
        "figure",
        parts=("self and mat2 must have the same dtype, but got",),
    ),
    Message(
        "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "torch/lib/libtorch_cpu.so",
        parts=("mat1 and mat2 must have the same dtype, but got",),
    ),
)


def show_cast_error(cast: Callable[[Any], Any]) -> Finding:
    """Quantize a bfloat16 layer to 4 bits, let ``cast`` make it float32, and call it."""
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    int4 = torch.int4  # type: ignore[attr-defined]
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32)))
    cast(model)
    try:
        out = model(torch.randn(2, 64))
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        return Finding(True, f"the forward fails: {error}")
    return Finding(False, f"weight {model[0].weight.dtype}, output {out.dtype}")
