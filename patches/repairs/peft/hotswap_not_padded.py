"""``prepare_model_for_compiled_hotswap`` does not pad LoRA on quantized layers, silently."""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import adapted_layer


def is_on_quantized_layer(module: Any) -> bool:
    """Tell whether ``module`` is LoRA on a linear layer of bitsandbytes, whose two factors are as those of a plain one."""
    from peft.tuners.lora import LoraLayer

    if not isinstance(module, LoraLayer):
        return False
    return type(module.get_base_layer()).__name__ in ("Linear4bit", "Linear8bitLt")


def defect() -> Finding:
    """Prepare LoRA of rank 2 on an INT8 layer for adapters of rank 4."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    base, _ = adapted_layer.quantized_model(int8=True)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["0"]))
    prepare_model_for_compiled_hotswap(model, target_rank=4)
    rank = model.base_model.model[0].lora_A["default"].weight.shape[0]
    return Finding(rank != 4, f"asked for rank 4, the adapter has rank {rank}")


PATCH = Patch(
    id="peft-hotswap-not-padded",
    summary="an adapter on quantized layers is not padded for hot swapping, and a compiled model refuses the next one",
    groups=("compile",),
    silent=True,
    messages=(
        Message(
            "Incompatible shapes found for LoRA weights base_model.model.0.lora_A.weight: torch.Size([4, 64]) vs torch.Size([8, 64]). Please ensure that all ranks are padded to the largest rank among all LoRA adapters by using peft.utils.hotswap.prepare_model_for_compiled_hotswap.",
            "peft/utils/hotswap.py",
            parts=("Incompatible shapes found for LoRA weights ",),
        ),
    ),
    links=("https://github.com/huggingface/peft/pull/2366",),
    why="""
        ``prepare_model_for_compiled_hotswap(model, target_rank=...)``, which ``enable_lora_hotswap`` of diffusers and
        transformers calls, pads each adapter with zeros, so that adapters of all ranks fit into one compiled graph. It
        looks for peft's ``Linear`` and ``Conv2d``, and silently skips LoRA on layers of bitsandbytes. The next adapter
        of a higher rank is then refused once the model is compiled: ``Incompatible shapes found for LoRA weights``.
        peft 0.16 to 0.21.
    """,
    repair="""
        With the repair LoRA on 4-bit and INT8 layers is padded as on plain layers: its two factors are plain linear
        layers there, too.
    """,
    requires=("peft>=0.16", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite(
            "peft.utils.hotswap:_pad_lora_weights",
            find="isinstance(module, Linear)",
            replace="isinstance(module, Linear) or _patches_is_on_quantized_layer(module)",
            names={"_patches_is_on_quantized_layer": is_on_quantized_layer},
        ),
    ),
    defect=defect,
)
