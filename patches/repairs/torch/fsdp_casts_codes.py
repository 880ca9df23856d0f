"""FSDP2's mixed precision casts packed 4-bit weights as if they were values.

``fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=...))`` casts every floating-point parameter before it is
gathered. Packed 4-bit weights are bytes, but with a floating-point ``quant_storage`` (which bitsandbytes and peft
recommend for FSDP) they have a floating-point dtype. If it differs from ``param_dtype``, they are cast. bfloat16
storage under float16, or the reverse, keeps the number of bytes but changes all values: outputs are silently 117 %
off. float32 storage under bfloat16, which peft's guide recommends for FSDP1, loses half of the bytes; on a CPU that
raises an error about a shape (``shape '[64, 32]' is invalid for input of size 1024``). Run on torch 2.13 and 2.15.
According to their source, earlier releases also cast integers.

The repair leaves packed weights in their dtype, as torch does for integers, so the layer computes what it computes
without a policy. Its bias and everything else is cast as requested. FSDP2 decides once for each parameter, before the
first forward. A model that has had its first forward keeps what was decided.

What it costs: nothing in a step.

Upstream: https://github.com/huggingface/peft/pull/1550 (recommended storage under mixed precision)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...distributed import gathered_weights
from ...engine import CannotShow, Finding, Patch, Rewrite
from ...engine.gate import satisfied

if TYPE_CHECKING:
    import torch

_CASTS_NOTHING = "param_dtype == self.orig_dtype"


def defect() -> Finding:
    """Gather a 4-bit weight stored as bfloat16 under a ``param_dtype`` of float16."""
    import tempfile

    import torch
    import torch.distributed as dist
    from bitsandbytes.nn import Linear4bit

    if satisfied("torch<2.7") and not torch.cuda.is_available():
        raise CannotShow("FSDP2 of torch 2.6 gathers nothing on a CPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", quant_storage=torch.bfloat16)
    layer.requires_grad_(False).to("cpu")
    codes = _bytes(layer.weight).clone()
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            policy = MixedPrecisionPolicy(param_dtype=torch.float16)
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
            layer.unshard()  # as every forward does
            gathered = _bytes(layer.weight).clone()
        finally:
            dist.destroy_process_group()
    others = int((gathered != codes).sum())
    return Finding(others > 0, f"{others} of {len(codes)} bytes of packed weights change when they are gathered")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().as_subclass(torch.Tensor).view(torch.uint8).flatten()


PATCH = Patch(
    id="torch-fsdp-casts-codes",
    summary="FSDP2's MixedPrecisionPolicy casts packed 4-bit weights: outputs are silently wrong",
    links=(
        "https://github.com/huggingface/peft/pull/1550",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1563",
    ),
    requires=("torch>=2.6", "bitsandbytes>=0.46.1"),
    tested_up_to="2.15.0",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_dtype_attrs",
            find=_CASTS_NOTHING,
            replace=f"({_CASTS_NOTHING} or _patches_holds_codes(self))",
            names={"_patches_holds_codes": gathered_weights.holds_packed_weight},
        ),
    ),
    defect=defect,
)
