"""``model.load_adapter`` silently leaves adapters of layers on the disk at random values.

transformers loads the tensors of an adapter by the device map of the model. If the map has a layer on the disk, the
tensor counts as offloaded and is not loaded: the adapter silently keeps its random initial values. If the map has a
layer on the CPU, the tensor goes there, although the layer runs on the device. Since 5.4; before 5.0 there was another
defect, ``transformers-load-adapter-dispatches-again``.

The repair loads adapters to the device where they are, which is where their layers run (``peft-adapters-on-meta``).
For a model without offload hooks the device map is used as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    import torch


def where(model: Any) -> dict[str, torch.device]:
    """The devices of what peft has put on ``model``, by module; for all else the one that offloaded modules run on."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    there = offloaded_modules.first_execution_device(model)
    if there is None:
        return getattr(model, "hf_device_map", {"": model.device})
    found = {"": there}
    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found.update((name, p.device) for p in module.parameters() if not p.is_meta)
    return found


def defect() -> Finding:
    """Load an adapter into a tiny Llama on disk, and compare with the same in memory."""
    import tempfile

    import torch
    from accelerate import disk_offload
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

    def model() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **size)).eval()

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with tempfile.TemporaryDirectory() as adapter, tempfile.TemporaryDirectory() as folder, torch.no_grad():
        get_peft_model(model(), config).save_pretrained(adapter)
        whole, offloaded_model = model(), model()
        offloaded_model.hf_device_map = {"": "disk"}
        disk_offload(offloaded_model, folder, execution_device=torch.device("cpu"))
        ids = torch.arange(8)[None]
        for loaded in (whole, offloaded_model):
            try:
                loaded.load_adapter(adapter)
            except ImportError as why:
                raise CannotShow(f"load_adapter of this transformers needs another peft: {why.msg}") from why
        error = float((offloaded_model(ids).logits - whole(ids).logits).norm() / whole(ids).logits.norm())
    return Finding(not error < 1e-6, f"relative error of the output {error:.1e}")


PATCH = Patch(
    id="transformers-load-adapter-offloaded",
    summary="model.load_adapter silently leaves adapters of layers on disk at random values",
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/peft.py#L296",),
    requires=("transformers>=5.4", "peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="5.24.0",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            "transformers.integrations.peft:PeftAdapterMixin.load_adapter",
            find='getattr(self, "hf_device_map", {"": self.device})',
            replace="_patches_where(self)",
            names={"_patches_where": where},
        ),
    ),
    defect=defect,
)
