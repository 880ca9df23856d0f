"""Prompt and prefix tuning of an offloaded model put their encoder on the meta device.

``PeftModel`` moves a new prompt encoder to the device of the model, which transformers reads from the first parameter,
usually the embedding. If the embedding is offloaded (``cpu_offload``, ``disk_offload``, a device map with "cpu"), that
is meta between two forwards. The trainable values are lost, and the first forward raises ``Tensor on device cpu is not
on the expected device meta!``. All releases.

With the repair the encoder goes to the execution device of the offloaded module. For any other model the device is
read as before and used as it is; models outside of transformers may return ``"cpu"`` or None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    import torch


def device_of(model: Any) -> torch.device | str | None:
    """What ``model`` says is its device, or that of its forward if its first parameter is offloaded."""
    device: torch.device | str | None = model.device
    there = offloaded_modules.first_execution_device(model) if str(device) == "meta" else None
    return device if there is None else there


def defect() -> Finding:
    """Prompt tuning of a tiny Llama in CPU memory."""
    import torch
    from accelerate import cpu_offload
    from peft import PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **size))
    cpu_offload(model, execution_device=torch.device("cpu"))
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    where = model.prompt_encoder["default"].embedding.weight.device
    return Finding(where.type == "meta", f"the prompt is on {where}")


PATCH = Patch(
    id="peft-prompt-encoder-on-meta",
    summary="prompt tuning fails on a model whose embedding is offloaded",
    links=("https://github.com/huggingface/peft/blob/v0.21.2/src/peft/peft_model.py",),
    requires=("peft>=0.14", "accelerate>=0.26.1", "transformers>=4.53"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            "peft.peft_model:PeftModel._setup_prompt_encoder",
            find="self.device",
            replace="_patches_device_of(self)",
            names={"_patches_device_of": device_of},
        ),
    ),
    defect=defect,
)
