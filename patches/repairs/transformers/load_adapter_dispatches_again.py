"""``model.load_adapter`` on an offloaded model fails, or dispatches the model a second time.

transformers 4.53 to 4.57 read the file of the adapter to the first device of the model's device map. If that is
"disk", it raises ``SafetensorError: device disk is invalid``. If it is a device, the whole model, with hooks and
adapters, is dispatched again by a map that is inferred from free memory, as ``peft-load-adapter-dispatches-again``
describes. transformers 5.0 does neither.

With the repair an offloaded model stays dispatched as it is, and the file is read to the device where its layers run.
Any other model is read and dispatched as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    import torch


def device_of(model: Any) -> str | int | torch.device:
    """Where the file of an adapter is read to."""
    there = offloaded_modules.first_execution_device(model)
    if there is not None:
        return there
    first: str | int | torch.device
    first = model.device if not hasattr(model, "hf_device_map") else list(model.hf_device_map.values())[0]
    return first


def defect() -> Finding:
    """Load an adapter into a tiny Llama that has its embedding on disk."""
    import tempfile

    import torch
    from accelerate import disk_offload
    from peft import LoraConfig, get_peft_model
    from safetensors import SafetensorError
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

    def model() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **size)).eval()

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with tempfile.TemporaryDirectory() as adapter, tempfile.TemporaryDirectory() as folder:
        get_peft_model(model(), config).save_pretrained(adapter)
        base = model()
        resident = dict.fromkeys(("model.layers", "model.norm", "lm_head"), "cpu")
        base.hf_device_map = {"model.embed_tokens": "disk", **resident}
        disk_offload(base.model.embed_tokens, folder, execution_device=torch.device("cpu"))
        try:
            base.load_adapter(adapter)
        except SafetensorError as error:
            return Finding(True, f"SafetensorError: {error}")
        return Finding(not offloaded_modules.is_offloaded(base), "the adapter is loaded")


_LOAD = "transformers.integrations.peft:PeftAdapterMixin.load_adapter"

PATCH = Patch(
    id="transformers-load-adapter-dispatches-again",
    summary="model.load_adapter on an offloaded model fails, or dispatches the model again",
    links=("https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/integrations/peft.py#L193",),
    requires=("transformers>=4.53,<5", "peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="4.57.6",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            _LOAD,
            find='getattr(self, "hf_device_map", None) is not None',
            replace='getattr(self, "hf_device_map", None) is not None and not _patches_offloaded(self)',
            names={"_patches_offloaded": offloaded_modules.is_offloaded},
        ),
        Rewrite(
            _LOAD,
            find='self.device if not hasattr(self, "hf_device_map") else list(self.hf_device_map.values())[0]',
            replace="_patches_device_of(self)",
            names={"_patches_device_of": device_of},
        ),
    ),
    defect=defect,
)
