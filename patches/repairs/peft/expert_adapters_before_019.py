"""Adapters of experts that peft 0.17 or 0.18 saved do not load in 0.19 and later, or load wrongly without a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...engine import Finding, Message, Part, Patch, Rewrite
from ...experts import adapter_layout_before_019


def defect_peftmodel() -> Finding:
    """Load an adapter of square experts, as peft 0.18 saves it, and compare it with what it was trained to add."""
    import torch
    from peft import PeftModel

    def make() -> Any:
        model: Any = torch.nn.Sequential()
        model.add_module("experts", torch.nn.Module())
        model.experts.weight = torch.nn.Parameter(torch.zeros(4, 16, 16))
        return model

    def load(folder: str) -> Any:
        model: Any = PeftModel.from_pretrained(make(), folder)
        return model.base_model.model.experts

    return _compare(make, load, "experts", "weight")


def defect_load_adapter_of_transformers() -> Finding:
    """Load an adapter of square experts, as peft 0.18 saves it, and compare it with what it was trained to add."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    config = Qwen3MoeConfig(vocab_size=16, num_key_value_heads=1, **sizes, **experts)

    def load(folder: str) -> Any:
        model = AutoModelForCausalLM.from_config(config)
        model.load_adapter(folder)
        return model.model.layers[0].mlp.experts

    return _compare(lambda: AutoModelForCausalLM.from_config(config), load, "model.layers.0.mlp.experts", "down_proj")


def _compare(make: Callable[[], Any], load: Callable[[str], Any], experts: str, parameter: str) -> Finding:
    """Save an adapter for ``experts`` of the model that ``make`` returns as peft 0.18 does, and ``load`` it.

    ``load`` takes the folder, and returns the layer that peft made of the experts: 4 with ``parameter`` of 16 x 16.
    """
    import json
    import tempfile
    from pathlib import Path

    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    torch.manual_seed(0)
    a, b = torch.randn(8, 16), torch.randn(16, 8)  # rank 2
    added = torch.einsum("ore,eri->eio", b.reshape(16, 2, 4), a.reshape(4, 2, 16))  # what 0.18 adds
    lora: Any = LoraConfig(r=2, lora_alpha=2, target_modules=[], target_parameters=[f"{experts}.{parameter}"])
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(make(), lora).save_pretrained(folder)
        tensors = {f"base_model.model.{experts}.lora_{letter}.weight": t for letter, t in (("A", a), ("B", b))}
        save_file(tensors, f"{folder}/adapter_model.safetensors")
        config = Path(folder, "adapter_config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), "peft_version": "0.18.1"}))
        loaded = load(folder).get_delta_weight("default")
    error = float((loaded - added).norm() / added.norm())
    return Finding(error > 1e-5, f"relative error of what the adapter adds {error:.1e}")


PATCH = Patch(
    id="peft-expert-adapters-before-019",
    summary="adapters of experts saved by peft 0.17 or 0.18 do not load, or silently load wrongly",
    groups=("experts", "save"),
    silent=True,
    messages=(
        Message(
            "size mismatch for base_model.model.model.layers.0.mlp.experts.lora_A.default.weight: copying a param with shape torch.Size([16, 96]) from checkpoint, the shape in current model is torch.Size([16, 64])",
            "torch/nn/modules/module.py",
            parts=("size mismatch for", "experts", "lora_", "copying a param with shape"),
            holds=("size mismatch for ",),
        ),
    ),
    links=("https://github.com/huggingface/peft/issues/3165",),
    why="""
        For a parameter (experts, out, in), as transformers stores experts, peft before 0.19 applies ``lora_A`` to
        the rows and ``lora_B`` to the columns of each expert. Since 0.19 it is the other way round. Files are not
        converted. If the numbers of rows and columns differ, loading raises ``size mismatch for
        ...lora_A.default.weight``. If they are equal (both directions of an OLMoE's ``gate_up_proj``, 2048), the
        adapter loads silently and adds another update: in the program below the output is wrong by as much as the
        adapter adds. Upstream: peft #3165. All releases from 0.19 on.

        ``model.load_adapter`` loads adapters of experts that peft 0.17 or 0.18 saved wrongly. transformers loads
        adapters without peft's own loading code, so a repair of peft's code alone does not run. If the matrices of the
        experts are square, the adapter loads silently and adds another update. If not, loading raises ``MISMATCH ...
        Reinit due to size mismatch``. transformers 5.
    """,
    repair="""
        The file holds the trained values in another order, so the repair permutes them on reading. The shapes of
        the adapter, all its parameters together, decide which layout it has. If all are square, the release that
        wrote it decides (``peft_version`` in ``adapter_config.json``, which 0.17 does not write), and a warning
        says so. An adapter with both layouts raises an error. Files in the layout of 0.19 are read as before.

        For ``model.load_adapter`` of transformers, the repair reads such a file, and only such a file, before
        transformers does, and passes its contents in the layout of the installed peft.
    """,
    former_ids=("transformers-expert-adapters-before-019",),
    parts=(
        Part(
            "PeftModel",
            ("peft>=0.19",),
            "0.21.2",
            (
                Rewrite(
                    "peft.utils.save_and_load:set_peft_model_state_dict",
                    find="_find_mismatched_keys(model, peft_model_state_dict, ignore_mismatched_sizes=ignore_mismatched_sizes)",
                    replace="""
                        _find_mismatched_keys(
                            model,
                            _patches_read(model, config, adapter_name, peft_model_state_dict),
                            ignore_mismatched_sizes=ignore_mismatched_sizes,
                        )
                    """,
                    names={"_patches_read": adapter_layout_before_019.convert_to_new_layout},
                ),
                adapter_layout_before_019.RECORD_VERSION,
            ),
            defect_peftmodel,
        ),
        Part(
            "load_adapter of transformers",
            # the releases left out raise an error without the patch, too: in their own build_peft_weight_mapping
            ("transformers>=5,!=5.1.0,!=5.6.0,!=5.6.1,!=5.6.2", "peft>=0.19"),
            "5.24.0",
            (
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
            defect_load_adapter_of_transformers,
        ),
    ),
)
