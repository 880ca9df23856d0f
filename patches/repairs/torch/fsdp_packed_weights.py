"""FSDP2 treats packed weights, which are bytes, as values."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Part, Patch, Rewrite
from ...engine.gate import satisfied
from ...quantized.four_bit import quant_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def holds_packed_weight(parameter: Any) -> bool:
    """Tell whether an ``FSDPParam`` shards the packed weight of a layer that bitsandbytes has quantized to 4 bits."""
    modules = sys.modules.get("bitsandbytes.nn.modules")
    if modules is None:
        return False
    owner = parameter._module_info
    if owner.param_name != "weight" or not isinstance(owner.module, (modules.Linear4bit, modules.Embedding4bit)):
        return False
    # The weight is a DTensor by now; the layer's forward knows by the quantization state on the layer, too.
    return quant_states.get_quant_state(owner.module) is not None


def parameter(data: Any) -> Any:
    """Return ``nn.Parameter(data)`` of one rank's part, a ``DTensor``; without gradients where its dtype has none.

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


def as_bytes(metadata: tuple[Any, Any, torch.dtype], parameters: Sequence[Any]) -> tuple[Any, Any, torch.dtype]:
    """Return dtypes, sizes and the common dtype of the gathered tensors: bytes if packed weights are among them."""
    import torch

    dtypes, sizes, common = metadata
    if common.is_floating_point and any(
        not parameter.sharded_param.requires_grad and holds_packed_weight(parameter) for parameter in parameters
    ):
        common = torch.uint8
    return dtypes, sizes, common


def _stored_as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bytes of ``tensor``, read as integers of ``dtype``."""
    import torch

    return tensor.detach().as_subclass(torch.Tensor).view(dtype).flatten().clone()


def defect_mixed_precision() -> Finding:
    """Gather a 4-bit weight stored as bfloat16 under a ``param_dtype`` of float16."""
    import torch
    from bitsandbytes.nn import Linear4bit

    if satisfied("torch<2.7") and not torch.cuda.is_available():
        raise CannotShow("FSDP2 of torch 2.6 gathers nothing on a CPU")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from ..reproducers.process_group import one_rank

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", quant_storage=torch.bfloat16)
    layer.requires_grad_(False).to("cpu")
    packed = _stored_as(torch.uint8, layer.weight)
    with one_rank() as mesh:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
        layer.unshard()  # as every forward does
        gathered = _stored_as(torch.uint8, layer.weight)
    others = int((gathered != packed).sum())
    return Finding(others > 0, f"{others} of {len(packed)} bytes of packed weights change when they are gathered")


def defect_integers() -> Finding:
    """Shard a 4-bit layer with the default storage over one rank."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.fsdp import fully_shard

    from ..reproducers.process_group import one_rank

    if satisfied("torch<2.7"):
        raise CannotShow("torch before 2.7 shards no parameters of two dtypes together, which is not repaired")
    layer = Linear4bit(64, 64, quant_type="nf4").requires_grad_(False).to("cpu")
    with one_rank() as mesh:
        try:
            fully_shard(layer, mesh=mesh)
        except RuntimeError as error:
            return Finding(True, f"fully_shard: {error}")
    whole = layer.weight.to_local() if hasattr(layer.weight, "to_local") else layer.weight
    return Finding(whole.dtype != torch.uint8, f"sharded as {whole.dtype}")


def defect_nan() -> Finding:
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
    # The other rank of torch's fake group sends nothing; this one has the first half of the weight.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(layer, mesh=init_device_mesh("cuda", (2,)))
        own = _stored_as(torch.int16, layer.weight.to_local())
        layer.unshard()  # as every forward does
        gathered = _stored_as(torch.int16, layer.weight)[: len(own)]
    finally:
        dist.destroy_process_group()
    others = int((gathered != own).sum())
    return Finding(others > 0, f"{others} of {len(own)} pairs of packed bytes change when they are gathered")


_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_KEEPS_DTYPE = "param_dtype == self.orig_dtype"
_METADATA = "_get_all_gather_input_metadatas(param_all_gather_inputs)"
_SHARDED = {
    "_init_sharded_param": "self.to_sharded_dtensor(sharded_param)",
    "to_sharded_post_forward": "self.to_sharded_post_forward_dtensor(sharded_post_forward_tensor)",
}

PATCH = Patch(
    id="torch-fsdp-packed-weights",
    summary="FSDP2 treats packed weights as values: it refuses integers, and casts and copies bytes as floating point",
    groups=("shard", "layers"),
    silent=True,
    messages=(Message("only Tensors of floating point dtype can require gradients", "torch/lib/libtorch_python.so"),),
    words=("loss is nan, or does not fall",),
    links=(
        "https://github.com/huggingface/peft/pull/1550",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1563",
        "https://github.com/pytorch/pytorch/issues/177844",
        "https://github.com/pytorch/pytorch/issues/185239",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1945",
    ),
    why="""
        FSDP2's mixed precision casts packed 4-bit weights as if they were values. ``fully_shard(...,
        mp_policy=MixedPrecisionPolicy(param_dtype=...))`` casts every floating-point parameter before it is
        gathered. Packed 4-bit weights are bytes, but with a floating-point ``quant_storage`` (which bitsandbytes
        and peft recommend for FSDP) they have a floating-point dtype. If it differs from ``param_dtype``, they are
        cast. bfloat16 storage under float16, or the reverse, keeps the number of bytes but changes all values:
        outputs are silently 117 % off. float32 storage under bfloat16, which peft's guide recommends for FSDP1,
        loses half of the bytes; on a CPU that raises an error about a shape (``shape '[64, 32]' is invalid for
        input of size 1024``). Run on torch 2.13 and 2.15. According to their source, earlier releases also cast
        integers.

        Upstream: https://github.com/huggingface/peft/pull/1550 (recommended storage under mixed precision)

        FSDP2 of torch before 2.12 refuses quantized layers: only Tensors of floating point dtype can require
        gradients. ``fully_shard`` creates the parameter for each rank's part with gradients, and turns them off
        afterwards. The packed weights of a quantized layer are integers, ``torch.int8`` in a ``Linear8bitLt`` and
        ``torch.uint8`` in a ``Linear4bit`` with the default storage, which cannot have gradients. So sharding
        raises this error, although they are frozen. 4-bit models can avoid it by a floating-point
        ``bnb_4bit_quant_storage``, INT8 models cannot. torch 2.12 creates the parameter like the original one.

        Upstream: https://github.com/pytorch/pytorch/issues/177844 (the same repair, in torch 2.12)

        On a GPU, FSDP2's gather changes packed 4-bit weights that read as NaN in the dtype in which they are
        stored. FSDP2 copies the gathered tensors with ``torch._foreach_copy_``, which on CUDA passes bfloat16 and
        float16 through float32: each NaN becomes the same one (0x7FFF in bfloat16). For values that is no loss.
        Packed 4-bit weights are bytes, stored as bfloat16 where bitsandbytes and peft recommend it for FSDP, and
        253 of the 65,536 pairs of bytes are NaNs other than that one (2045 in float16). They become weights that
        were never trained: outputs are silently wrong, on two ranks or more, whatever the policy. On one rank torch
        2.11 and later gather nothing; the report is from one rank, too. On a CPU the copy keeps every bit.
    """,
    repair="""
        Under mixed precision the repair leaves packed weights in their dtype, as torch does for integers, so the layer
        computes the same as without a policy. Its bias and everything else is cast as requested. FSDP2 decides once for
        each parameter, before the first forward. A model that has had its first forward keeps what was decided.

        For integers the repair creates the parameter of a rank's part without gradients. Floating-point parameters are
        created as before. torch 2.6 is not repaired: there all parameters that are sharded together must have one
        dtype, so a quantized layer cannot be sharded together with its adapter. On a CPU, FSDP2 of torch before 2.9
        adds up the gradients of the ranks instead of averaging them, for every model (ratio 2.0 for one ``nn.Linear``
        on two ranks; 1.0 on 2.9). There the error stays, and says why.

        On a GPU the repair gathers the parameters of a group as bytes if one of them is a packed 4-bit weight, as torch
        itself does for a group of several dtypes.
    """,
    cost="""
        A look at each frozen parameter of a group when the group is gathered, less than a microsecond each. Otherwise
        nothing in a step.
    """,
    former_ids=("torch-fsdp-casts-codes", "torch-fsdp-integer-weights", "torch-fsdp-nan-codes"),
    parts=(
        Part(
            "mixed precision",
            ("torch>=2.6", "bitsandbytes>=0.46.1"),
            "2.15.0",
            (
                Rewrite(
                    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_dtype_attrs",
                    find=_KEEPS_DTYPE,
                    replace=f"({_KEEPS_DTYPE} or _patches_holds_packed_weight(self))",
                    names={"_patches_holds_packed_weight": holds_packed_weight},
                ),
            ),
            defect_mixed_precision,
        ),
        Part(
            "integers",
            ("torch>=2.7,<2.12", "bitsandbytes>=0.46.1"),
            "2.11.0",
            tuple(
                Rewrite.to_call(f"{_PARAMETER}.{method}", f"nn.Parameter({part})", parameter, part)
                for method, part in _SHARDED.items()
            ),
            defect_integers,
        ),
        Part(
            "NaN",
            ("torch>=2.6", "bitsandbytes>=0.46.1"),
            "2.13.0",
            (
                Rewrite(
                    "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_all_gather",
                    find=_METADATA,
                    replace=f"_patches_as_bytes({_METADATA}, fsdp_params)",
                    names={"_patches_as_bytes": as_bytes},
                ),
            ),
            defect_nan,
        ),
    ),
)
