"""``model.load_adapter`` loads adapters of experts that peft 0.17 or 0.18 saved wrongly.

transformers loads adapters without peft's own loading code, so ``peft-expert-adapters-before-019``, which tells the
two layouts apart, does not run. If the matrices of the experts are square, the adapter loads silently and adds another
update. If not, loading raises ``MISMATCH ... Reinit due to size mismatch``. transformers 5.

The repair reads such a file, and only such a file, before transformers does, and passes its contents in the layout of
the installed peft.
"""

from __future__ import annotations

from typing import Any

from ...engine import Finding, Patch, Rewrite
from ...experts import adapter_layout_before_019


def defect() -> Finding:
    """An adapter as peft 0.18 saves it, of square experts, is loaded and compared with what it was trained to add."""
    import json
    import tempfile
    from pathlib import Path

    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    torch.manual_seed(0)
    a, b = torch.randn(8, 16), torch.randn(16, 8)  # of 4 experts, rank 2
    config = LoraConfig(r=2, lora_alpha=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    added = torch.einsum("ore,eri->eio", b.reshape(16, 2, 4), a.reshape(4, 2, 16))  # what 0.18 adds
    key = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight"
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(_mixture(), config).save_pretrained(folder)
        save_file({key.format("A"): a, key.format("B"): b}, f"{folder}/adapter_model.safetensors")
        said = Path(folder, "adapter_config.json")
        said.write_text(json.dumps({**json.loads(said.read_text()), "peft_version": "0.18.1"}))
        model = _mixture()
        model.load_adapter(folder)
    loaded = model.model.layers[0].mlp.experts.get_delta_weight("default")
    error = float((loaded - added).norm() / added.norm())
    return Finding(error > 1e-5, f"relative error of what the adapter adds {error:.1e}")


def _mixture() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=16, num_key_value_heads=1, **sizes, **experts))


PATCH = Patch(
    id="transformers-expert-adapters-before-019",
    summary="model.load_adapter silently loads adapters of experts saved by peft 0.17 or 0.18 wrongly",
    links=("https://github.com/huggingface/peft/issues/3165",),
    requires=("transformers>=5", "peft>=0.19"),
    tested_up_to="5.24.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "transformers.integrations.peft:PeftAdapterMixin.load_adapter",
            find="inject_adapter_in_model(peft_config, self, adapter_name)",
            replace="""
                inject_adapter_in_model(peft_config, self, adapter_name)
                adapter_state_dict = _patches_of_file(
                    self, peft_config, adapter_name, adapter_state_dict, peft_model_id
                )
            """,
            names={"_patches_of_file": adapter_layout_before_019.converted_state_dict},
        ),
        adapter_layout_before_019.RECORD_VERSION,
    ),
    defect=defect,
)
