"""``Int8Params.to(dtype)`` drops the row scales."""

from __future__ import annotations

from ....engine import Finding, Patch
from ....quantized.int8.weight_moves import keep_packed_weight, scales_follow


def defect() -> Finding:
    """Cast a weight to another dtype, and dequantize it by hand."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    cast = bnb.nn.Int8Params(weight, requires_grad=False).to("cpu").to(torch.float32)
    if cast.SCB is None:
        return Finding(True, "the scales of all 64 rows are gone")
    error = float((cast.data * cast.SCB.view(-1, 1) / 127 - weight).norm() / weight.norm())
    return Finding(error > 1e-2, f"relative error of the dequantized weight {error:.1e}")


PATCH = Patch(
    id="bitsandbytes-int8-cast-loses-scale",
    summary="Int8Params.to(dtype) silently drops the row scales",
    groups=("move",),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        From 0.48 on, ``to`` keeps the scales only if a device is given. accelerate calls ``weight.to(torch.int8)``
        on every weight that it brings back, and ``weight.to(torch.float16)`` is the first step of a dequantization
        by hand. Both silently return packed weights whose ``SCB`` is None.
    """,
    repair="""
        The repair moves the scales to the device of the new parameter. They keep their dtype. On 0.48.0 and 0.48.1
        ``to`` cannot move a weight whose scales are on meta, either, so ``bitsandbytes-int8-scales-lost-on-offload``
        is part of this patch there.
    """,
    requires=("bitsandbytes>=0.48",),
    tested_up_to="0.50.2",
    edits=(
        *scales_follow(
            'device is not None and self.SCB is not None and self.SCB.device.type != "meta"',
            when="bitsandbytes>=0.48.2",
        ),
        *keep_packed_weight("<0.48.2"),
    ),
    defect=defect,
)
