"""FSDP2 of torch before 2.12 refuses quantized layers: only Tensors of floating point dtype can require gradients.

``fully_shard`` creates the parameter for each rank's part with gradients, and turns them off afterwards. The packed
weights of a quantized layer are integers, ``torch.int8`` in a ``Linear8bitLt`` and ``torch.uint8`` in a ``Linear4bit``
with the default storage, which cannot have gradients. So sharding raises this error, although they are frozen. 4-bit
models can avoid it by a floating-point ``bnb_4bit_quant_storage``, INT8 models cannot. torch 2.12 creates the
parameter like the original one.

The repair creates such a parameter without gradients. Floating-point parameters are created as before. torch 2.6 is
not repaired: there all parameters that are sharded together must have one dtype, so a quantized layer cannot be
sharded together with its adapter. On a CPU, FSDP2 of torch before 2.9 adds up the gradients of the ranks instead of
averaging them, for every model (ratio 2.0 for one ``nn.Linear`` on two ranks; 1.0 on 2.9). There the error stays, and
says why.

What it costs: nothing in a step.

Upstream: https://github.com/pytorch/pytorch/issues/177844 (the same repair, in torch 2.12)
"""

from __future__ import annotations

from typing import Any

from ...engine import CannotShow, Finding, Patch, Rewrite
from ...engine.gate import satisfied

_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_AFTER_FORWARD = "self.to_sharded_post_forward_dtensor(sharded_post_forward_tensor)"


def parameter(data: Any) -> Any:
    """``nn.Parameter(data)`` of one rank's part, a ``DTensor``; without gradients where its dtype has none.

    Raises `RuntimeError` where torch would then compute other gradients: several ranks on a CPU, before torch 2.9.
    """
    import torch

    takes = data.is_floating_point() or data.is_complex()
    if not takes and data.device.type == "cpu" and data.device_mesh.size() > 1 and satisfied("torch<2.9"):
        raise RuntimeError(
            "FSDP2 of torch before 2.9 adds up the gradients of the ranks on a CPU instead of averaging them, so that a model "
            "with quantized layers would train with other gradients. Use torch 2.9 or later, or a GPU."
        )
    return torch.nn.Parameter(data, requires_grad=takes)


def defect() -> Finding:
    """Shard a 4-bit layer with the default storage over one rank."""
    import tempfile

    import torch
    import torch.distributed as dist
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if satisfied("torch<2.7"):
        raise CannotShow("torch before 2.7 shards no parameters of two dtypes together, which is not repaired")
    layer = Linear4bit(64, 64, quant_type="nf4").requires_grad_(False).to("cpu")
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        except RuntimeError as error:
            return Finding(True, f"fully_shard: {error}")
        finally:
            dist.destroy_process_group()
    whole = layer.weight.to_local() if hasattr(layer.weight, "to_local") else layer.weight
    return Finding(whole.dtype != torch.uint8, f"sharded as {whole.dtype}")


PATCH = Patch(
    id="torch-fsdp-integer-weights",
    summary="FSDP2 of torch before 2.12 cannot shard quantized layers: only Tensors of floating point dtype can require gradients",
    links=("https://github.com/pytorch/pytorch/issues/177844", "https://github.com/pytorch/pytorch/issues/185239"),
    requires=("torch>=2.7,<2.12", "bitsandbytes>=0.46.1"),
    tested_up_to="2.11.0",
    seen_on=("2.8", "2.9", "2.11"),
    edits=(
        Rewrite(
            f"{_PARAMETER}._init_sharded_param",
            find="nn.Parameter(self.to_sharded_dtensor(sharded_param))",
            replace="_patches_parameter(self.to_sharded_dtensor(sharded_param))",
            names={"_patches_parameter": parameter},
        ),
        Rewrite(
            f"{_PARAMETER}.to_sharded_post_forward",
            find=f"nn.Parameter({_AFTER_FORWARD})",
            replace=f"_patches_parameter({_AFTER_FORWARD})",
            names={"_patches_parameter": parameter},
        ),
    ),
    defect=defect,
)
