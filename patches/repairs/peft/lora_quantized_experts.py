"""LoRA on experts in 4 bits makes all of them dense in each step, and cannot be merged.

peft trains a parameter (``LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])``) by adding the adapter to the
weights for the time of a forward: ``W + scaling * B @ A``, for all experts of a layer at once. Of experts that
``patches.quantize_experts`` has quantized that sum is a floating-point tensor of full size, which autograd keeps for
backward: of a Qwen3-30B-A3B 1.2 GB a layer, 58 GB without checkpointing. The plugin's tensor gives it and says so.
Merging is an error, as ``param.data += delta`` would write into packed weights.

With the patch the wrapper's sum is never formed (``helpers/experts/adapted.py``). An expert that tokens chose is
dequantized for its product, and its own slices of ``lora_A`` and ``lora_B`` are applied to these tokens, for each
active adapter. Gradients equal those of the model whose experts are rounded in floating point, up to rounding (1e-6).
Merging dequantizes, adds and quantizes one expert at a time, and unmerging puts back the packed weights that were
there before, as ``peft-unmerge-lora`` does for ``Linear4bit``. Parameters in floating point take the same path as
before.
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ..helpers.experts import lora

_LAYER = "peft.tuners.lora.layer:ParamWrapper"


def defect() -> Finding:
    """A training step with LoRA on quantized experts: does an operation dequantize all experts of a layer at once?"""
    import torch
    from peft import LoraConfig, get_peft_model

    from ..helpers.experts.dense import COUNTS
    from ..helpers.experts.quantize import quantize_model
    from ..helpers.loading.experts import loaded_in_4bit

    torch.manual_seed(0)
    base = loaded_in_4bit()
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
    summary="LoRA on experts in 4 bits makes all experts of a layer dense in each step, and cannot be merged",
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
            names={"_patches_delta": lora.delta},
        ),
        Rewrite(
            f"{_LAYER}._activate_lora",
            find="self.num_experts > 1",
            replace="self.num_experts > 1 and not _patches_is_quantized(self)",
            names={"_patches_is_quantized": lora.is_quantized},
            when="peft>=0.21",
        ),
        Rewrite(
            f"{_LAYER}.merge",
            find="active_adapter in self.lora_A.keys()",
            replace="active_adapter in self.lora_A.keys() and not _patches_merged(self, active_adapter, safe_merge)",
            names={"_patches_merged": lora.merged},
        ),
        Rewrite(
            f"{_LAYER}.unmerge",
            find="len(self.merged_adapters) > 0",
            replace="len(self.merged_adapters) > 0 and not _patches_unmerged(self)",
            names={"_patches_unmerged": lora.unmerged},
        ),
    ),
    defect=defect,
)
