"""LoRA on quantized experts dequantizes all experts of a layer in each step, and cannot be merged.

To train a parameter (``LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])``), peft adds the adapter to the
weights during a forward: ``W + scaling * B @ A``, for all experts of a layer at once. If ``patches.quantize_experts``
has quantized the experts, that sum is a floating-point tensor of full size, which autograd keeps for backward: for
Qwen3-30B-A3B 1.2 GB a layer, 58 GB without checkpointing. The plugin's tensor computes it and logs that. Merging
raises an error, because ``param.data += delta`` would write into packed weights.

With the patch this sum is never computed (``experts/adapted_experts.py``). Only experts that tokens chose are
dequantized, one at a time, and their slices of ``lora_A`` and ``lora_B`` are applied to these tokens, for each active
adapter. Gradients equal those of the dequantized model up to rounding (1e-6). Merging dequantizes, adds and quantizes
one expert at a time. Unmerging restores the packed weights from before, as ``peft-unmerge-lora`` does for
``Linear4bit``. Parameters in floating point take the old path.

In each forward peft registers a parametrization, for which torch exchanges a parameter of such a class with itself. That
raises an error if anything holds a weak reference to it, as ``torch.compile`` does. A parameter is no longer exchanged
with itself.
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...experts import lora_factors

_LAYER = "peft.tuners.lora.layer:ParamWrapper"


def defect() -> Finding:
    """A training step with LoRA on quantized experts: does an operation dequantize all experts of a layer at once?"""
    import torch
    from peft import LoraConfig, get_peft_model

    from ...experts.dense_operations import COUNTS
    from ...experts.quantize import quantize_model
    from ..reproducers.mixtures import load_mixture_in_4bit

    torch.manual_seed(0)
    base = load_mixture_in_4bit()
    quantize_model(base)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(base, LoraConfig(r=2, target_modules=[], target_parameters=names[:1]))
    before = COUNTS.total()
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    dense = COUNTS.total() - before
    return Finding(dense > 0, f"all experts of a layer were dequantized together {dense} times")


PATCH = Patch(
    id="peft-lora-quantized-experts",
    summary="LoRA on quantized experts dequantizes all experts of a layer in each step, and cannot be merged",
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        "https://github.com/axolotl-ai-cloud/axolotl/issues/3395",
    ),
    requires=("peft>=0.17", "bitsandbytes>=0.46.1", "transformers>=5"),
    tested_up_to="0.21.2",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            f"{_LAYER}._activate_lora",
            find="self.get_delta_weight(active_adapter)",
            replace="_patches_delta(self, active_adapter)",
            count=2,
            names={"_patches_delta": lora_factors.delta_weight},
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
    defect=defect,
)
