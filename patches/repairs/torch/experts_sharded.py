"""FSDP2 shards quantized experts in floating point: in bf16 3.5 times the memory on each rank.

``fully_shard`` makes a padded copy of a rank's part of each parameter, and also keeps it flat. For experts that
``patches.quantize_experts`` has quantized, both are ordinary floating-point tensors: the plugin's tensor computes them
and logs that. Qwen3-30B-A3B then needs 58 GB over all ranks, and each layer 1.2 GB while it is gathered.

With the patch a rank holds the packed weights and scales of its experts, FSDP2 gathers these, and a layer computes
with a quantized parameter. Outputs and gradients equal those of one process. If the number of experts is not a
multiple of the number of ranks, they are sharded in floating point as before, and the log says so. Parameters that are
not quantized take the old path.

What it costs: nothing in a step.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849 (experts that bitsandbytes does not
quantize)
"""

from __future__ import annotations

from typing import Any

from ...engine import CannotShow, Finding, Patch, Rewrite
from ...engine.gate import satisfied
from ...experts import fsdp

_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"


def defect() -> Finding:
    """Shard quantized experts over one rank: how many bytes does it hold?"""
    import tempfile

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ...experts.quantize import QuantizationConfig, quantize_and_pack
    from ...experts.tensor import as_parameter

    if satisfied("torch<2.7"):
        raise CannotShow("experts in 4 bits are sharded in floating point on torch before 2.7, which is not repaired")
    torch.manual_seed(0)
    module, experts = (
        torch.nn.Module(),
        quantize_and_pack(torch.randn(4, 32, 64), 2, QuantizationConfig("nf4", False, torch.uint8)),
    )
    module.register_parameter("experts", as_parameter(experts))
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            shard: Any = module.get_parameter("experts")
            after = int(shard.to_local().nbytes)
        finally:
            dist.destroy_process_group()
    return Finding(
        after > experts.nbytes, f"{experts.nbytes} bytes of experts in 4 bits are {after} once they are sharded"
    )


PATCH = Patch(
    id="torch-experts-sharded",
    summary="FSDP2 shards quantized experts in floating point: in bf16 3.5 times the memory on each rank",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",),
    requires=("torch>=2.7", "bitsandbytes>=0.46.1"),
    tested_up_to="2.15.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            f"{_PARAMETER}._init_sharded_param",
            find="param_data.new_zeros(padded_sharded_size)",
            replace="_patches_zeros(param_data, padded_sharded_size, shard_world_size)",
            names={"_patches_zeros": fsdp.new_zeros_of_parts},
        ),
        Rewrite(
            f"{_PARAMETER}._init_sharded_param",
            find="padded_sharded_param.view(-1)",
            replace="_patches_flat(padded_sharded_param)",
            names={"_patches_flat": fsdp.flatten_for_fsdp},
        ),
        Rewrite(
            f"{_PARAMETER}.reset_sharded_param",
            find="local_tensor.view(-1)",
            replace="_patches_flat(local_tensor)",
            names={"_patches_flat": fsdp.flatten_for_fsdp},
        ),
    ),
    defect=defect,
)
