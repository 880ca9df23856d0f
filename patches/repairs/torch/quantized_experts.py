"""What FSDP2, DistributedDataParallel and peft need to know of experts that ``patches.quantize_experts`` has quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Part, Patch, Rewrite
from ...engine.gate import satisfied
from ...experts import fsdp, lora_factors

if TYPE_CHECKING:
    import torch


def _quantized() -> torch.nn.Parameter:
    """Return four experts in 4 bits, of two matrices each, as ``patches.quantize_experts`` makes them."""
    import torch

    from ...experts.quantize import QuantizationConfig, split_and_quantize_experts
    from ...experts.tensor import as_parameter

    return as_parameter(
        split_and_quantize_experts(torch.randn(4, 32, 64), 2, QuantizationConfig("nf4", False, torch.uint8))
    )


def defect_fsdp2() -> Finding:
    """Shard quantized experts over one rank: how many bytes does it hold?"""
    import torch
    from torch.distributed.fsdp import fully_shard

    from ..reproducers.process_group import one_rank

    if satisfied("torch<2.7"):
        raise CannotShow("experts in 4 bits are sharded in floating point on torch before 2.7, which is not repaired")
    torch.manual_seed(0)
    module, experts = torch.nn.Module(), _quantized()
    module.register_parameter("experts", experts)
    before = experts.nbytes
    with one_rank() as mesh:
        fully_shard(module, mesh=mesh)
        shard: Any = module.get_parameter("experts")
        after = int(shard.to_local().nbytes)
    return Finding(after > before, f"{before} bytes of experts in 4 bits are {after} once they are sharded")


def defect_ddp() -> Finding:
    """Wrap a module with quantized experts in DistributedDataParallel, on one rank."""
    import torch

    from ..reproducers.process_group import one_rank

    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    module.register_parameter("experts", _quantized())
    with one_rank():
        try:
            torch.nn.parallel.DistributedDataParallel(module)
        except RuntimeError as error:
            return Finding(True, str(error).partition(".")[0])
    return Finding(False, "the packed weights are broadcast")


def defect_lora() -> Finding:
    """Train a step with LoRA on quantized experts: does an operation dequantize all experts of a layer at once?"""
    import torch
    from peft import LoraConfig, get_peft_model

    from ...experts.dense_operations import COUNTS
    from ...experts.quantize import quantize_model
    from ..reproducers.mixtures import load_mixture_in_4bit

    torch.manual_seed(0)
    base = load_mixture_in_4bit()
    quantize_model(base)
    config = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    model = get_peft_model(base, config)
    before = COUNTS.total()
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    dense = COUNTS.total() - before
    return Finding(dense > 0, f"all experts of a layer were dequantized together {dense} times")


_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_SYNC = "_sync_params_and_buffers(process_group, {}, broadcast_bucket_size, src)"
_LAYER = "peft.tuners.lora.layer:ParamWrapper"

PATCH = Patch(
    id="torch-quantized-experts",
    effect="feature",
    summary="FSDP2, DistributedDataParallel and LoRA dequantize experts that quantize_experts has quantized, or fail",
    groups=("experts", "train", "merge", "shard"),
    silent=True,
    messages=(
        Message(
            "quantized experts of shape (4, 32, 64) cannot take a Tensor in torch.float32",
            "figure",
            parts=("quantized experts of shape", "cannot take a Tensor in torch"),
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/3395",
    ),
    why="""
        FSDP2 shards quantized experts in floating point: in bf16 3.5 times the memory on each rank. ``fully_shard``
        makes a padded copy of a rank's part of each parameter, and also keeps it flat. For experts that
        ``patches.quantize_experts`` has quantized, both are ordinary floating-point tensors: the class of the quantized
        experts dequantizes for both and logs that. Qwen3-30B-A3B then needs 58 GB over all ranks, and each layer 1.2 GB
        while it is gathered.

        DistributedDataParallel raises an error for a model with quantized experts. When it is created,
        ``DistributedDataParallel`` broadcasts all parameters of rank 0, joined by dtype. Experts that
        ``patches.quantize_experts`` has quantized report a floating-point dtype. They are dequantized to be joined,
        and the result cannot be written back into packed weights. So QLoRA on several GPUs ends before its first
        step: ``quantized experts of shape ... cannot take a Tensor in torch.float32``.

        Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849 (experts that bitsandbytes
        does not quantize)

        LoRA on quantized experts dequantizes all experts of a layer in each step, and cannot be merged. To train a
        parameter (``LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])``), peft adds the adapter to the weights
        during a forward: ``W + scaling * B @ A``, for all experts of a layer at once. If ``patches.quantize_experts``
        has quantized the experts, that sum is a floating-point tensor of full size, which autograd keeps for backward:
        for Qwen3-30B-A3B 1.2 GB a layer, 58 GB without checkpointing. The class of the quantized experts dequantizes
        for this sum and logs that. Merging raises an error, because ``param.data += delta`` would write into packed
        weights.
    """,
    repair="""
        With the patch, under FSDP2, a rank holds the packed weights and scales of its experts, FSDP2 gathers these, and
        a layer computes with a quantized parameter. Outputs and gradients equal the ones of one process. If the number
        of experts is not a multiple of the number of ranks, they are sharded in floating point as before, and the log
        says so. Parameters that are not quantized take the old path.

        With the patch, DistributedDataParallel broadcasts the packed weights and scales, like the ones of
        ``Linear4bit``, so all ranks have the experts of rank 0. Other parameters are broadcast as before.

        With the patch, the sum of weights and LoRA is never computed (``experts/adapted_experts.py``). Only experts
        that tokens chose are dequantized, one at a time, and their slices of ``lora_A`` and ``lora_B`` are applied to
        these tokens, for each active adapter. Gradients equal the dequantized model's up to rounding (1e-6). Merging
        dequantizes, adds and quantizes one expert at a time. Unmerging restores the packed weights from before, as
        ``peft-unmerge`` does for ``Linear4bit``. Parameters in floating point take the old path.

        In each forward peft registers a parametrization, for which torch exchanges a parameter of such a class with
        itself. That raises an error if anything holds a weak reference to it, as ``torch.compile`` does. With the
        patch, torch does not exchange a parameter with itself.
    """,
    cost="""
        Nothing in a step.
    """,
    former_ids=("torch-experts-sharded", "torch-experts-in-ddp", "peft-lora-quantized-experts"),
    parts=(
        Part(
            "FSDP2",
            ("torch>=2.7", "bitsandbytes>=0.46.1"),
            "2.15.0",
            (
                Rewrite.to_call(
                    f"{_PARAMETER}._init_sharded_param",
                    "param_data.new_zeros(padded_sharded_size)",
                    fsdp.new_zeros_of_parts,
                    "param_data, padded_sharded_size, shard_world_size",
                ),
                Rewrite.to_call(
                    f"{_PARAMETER}._init_sharded_param",
                    "padded_sharded_param.view(-1)",
                    fsdp.flatten_for_fsdp,
                    "padded_sharded_param",
                ),
                Rewrite.to_call(
                    f"{_PARAMETER}.reset_sharded_param", "local_tensor.view(-1)", fsdp.flatten_for_fsdp, "local_tensor"
                ),
            ),
            defect_fsdp2,
        ),
        Part(
            "DDP",
            ("torch>=2.6", "bitsandbytes>=0.46.1"),
            "2.15.0",
            (
                Rewrite(
                    "torch.distributed.utils:_sync_module_states",
                    find=_SYNC.format("module_states"),
                    replace=_SYNC.format("_patches_apart(module_states)"),
                    names={"_patches_apart": fsdp.split_into_tensors},
                ),
            ),
            defect_ddp,
        ),
        Part(
            "LoRA",
            ("peft>=0.17", "bitsandbytes>=0.46.1", "transformers>=5"),
            "0.21.2",
            (
                Rewrite.to_call(
                    f"{_LAYER}._activate_lora",
                    "self.get_delta_weight(active_adapter)",
                    lora_factors.delta_weight,
                    "self, active_adapter",
                    count=2,
                ),
                Rewrite(
                    f"{_LAYER}._activate_lora",
                    find="self.num_experts > 1",
                    replace="self.num_experts > 1 and not _patches_is_quantized(self)",
                    names={"_patches_is_quantized": lora_factors.adapts_quantized_experts},
                    when="peft>=0.21",
                ),
                Rewrite(
                    f"{_LAYER}.merge",
                    find="active_adapter in self.lora_A.keys()",
                    replace="active_adapter in self.lora_A.keys() and not _patches_merged(self, active_adapter, safe_merge)",
                    names={"_patches_merged": lora_factors.merge_adapter},
                ),
                Rewrite(
                    f"{_LAYER}.unmerge",
                    find="len(self.merged_adapters) > 0",
                    replace="len(self.merged_adapters) > 0 and not _patches_unmerged(self)",
                    names={"_patches_unmerged": lora_factors.unmerge_adapters},
                ),
                Rewrite(
                    "torch.nn.utils.parametrize:_maybe_set",
                    find="torch.utils.swap_tensors(dest, src)",
                    replace="dest is src or torch.utils.swap_tensors(dest, src)",
                ),
            ),
            defect_lora,
        ),
    ),
)
