"""On a GPU, FSDP2's gather changes packed 4-bit weights that read as NaN in the dtype in which they are stored.

FSDP2 copies what it gathers with ``torch._foreach_copy_``, which on CUDA passes bfloat16 and float16 through float32: each
NaN becomes the same one (0x7FFF in bfloat16). For values that is no loss. Packed 4-bit weights are bytes, stored as
bfloat16 where bitsandbytes and peft recommend it for FSDP, and 253 of the 65,536 pairs of bytes are NaNs other than that one
(2045 in float16). They become weights that nobody trained: outputs are silently wrong, on two ranks or more, whatever the
policy. On one rank torch 2.11 and later gather nothing; the report is from one rank, too. On a CPU the copy keeps every bit.

The repair gathers the parameters of a group as bytes if one of them is such a weight, as torch itself does for a group of
several dtypes.

What it costs: a look at each frozen parameter of a group when it is gathered, less than a microsecond each.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1945
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...distributed import gathered_weights
from ...engine import CannotShow, Finding, Patch, Rewrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_METADATA = "_get_all_gather_input_metadatas(param_all_gather_inputs)"


def as_bytes(metadata: tuple[Any, Any, torch.dtype], parameters: Sequence[Any]) -> tuple[Any, Any, torch.dtype]:
    """Dtypes, sizes and the common dtype of what is gathered, the last one bytes if packed weights are among it."""
    import torch

    dtypes, sizes, common = metadata
    if common.is_floating_point and any(
        not parameter.sharded_param.requires_grad and gathered_weights.holds_packed_weight(parameter)
        for parameter in parameters
    ):
        common = torch.uint8
    return dtypes, sizes, common


def defect() -> Finding:
    """Gather a 4-bit weight stored as bfloat16, in a group of two ranks of which this is the first."""
    import torch

    if not torch.cuda.is_available():
        raise CannotShow("needs a GPU: a CPU copies every bit")
    import torch.distributed as dist
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.manual_seed(0)
    layer = Linear4bit(512, 512, bias=False, quant_type="nf4", quant_storage=torch.bfloat16)
    layer.requires_grad_(False).to("cuda")
    # The other rank of torch's fake group sends nothing; what this one has of the weight is the first half.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(layer, mesh=init_device_mesh("cuda", (2,)))
        own = _words(layer.weight.to_local()).clone()
        layer.unshard()  # as every forward does
        gathered = _words(layer.weight)[: len(own)].clone()
    finally:
        dist.destroy_process_group()
    others = int((gathered != own).sum())
    return Finding(others > 0, f"{others} of {len(own)} pairs of packed bytes change when they are gathered")


def _words(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().as_subclass(torch.Tensor).view(torch.int16).flatten()


PATCH = Patch(
    id="torch-fsdp-nan-codes",
    summary="On a GPU, FSDP2's gather changes packed 4-bit weights that read as NaN: outputs are silently wrong",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1945",),
    requires=("torch>=2.6", "bitsandbytes>=0.46.1"),
    tested_up_to="2.13.0",
    seen_on=("2.11",),
    edits=(
        Rewrite(
            "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_all_gather",
            find=_METADATA,
            replace=f"_patches_as_bytes({_METADATA}, fsdp_params)",
            names={"_patches_as_bytes": as_bytes},
        ),
    ),
    defect=defect,
)
