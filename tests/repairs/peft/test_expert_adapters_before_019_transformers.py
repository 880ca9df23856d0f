"""``model.load_adapter`` of adapters of experts in the layout of peft 0.17 and 0.18.

Three adapters that peft 0.18.1 itself had saved were read with a difference of 0 when this was written.
"""

from __future__ import annotations

import copy
import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import patches
from patches.engine.gate import satisfied

ID = "peft-expert-adapters-before-019"
EXPERTS, RANK = 4, 2
IDS = torch.arange(12)[None]

if satisfied("transformers<5") or satisfied("peft<0.19"):
    pytest.skip(
        "transformers 5 loads adapters by itself; peft has another layout from 0.19 on", allow_module_level=True
    )

from safetensors.torch import save_file


def mixture(inner):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    experts = dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=inner)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=16, num_key_value_heads=1, **sizes, **experts)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def old_adapter(folder, model):
    """Writes an old adapter of ``down_proj``; returns the model with what it adds in its weights."""
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    merged = copy.deepcopy(model)
    parameter = merged.model.layers[0].mlp.experts.down_proj
    _, rows, columns = parameter.shape
    a, b = 0.1 * torch.randn(EXPERTS * RANK, rows), torch.randn(columns, RANK * EXPERTS)
    key = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight"
    save_file({key.format("A"): a, key.format("B"): b}, folder / "adapter_model.safetensors")
    said = json.loads((folder / "adapter_config.json").read_text()) | {"peft_version": "0.18.1"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    added = torch.einsum("ore,eri->eio", b.view(columns, RANK, EXPERTS), a.view(EXPERTS, RANK, rows))
    parameter.data += added
    return merged


@pytest.mark.parametrize("inner", [32, 16], ids=["square", "not square"])
def test_an_old_adapter_is_read_as_what_it_is(tmp_path, inner):
    model = mixture(inner)
    expected = logits(old_adapter(tmp_path, model))
    with patches.applied(ID):
        model.load_adapter(str(tmp_path))
        assert torch.allclose(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_new_adapter_is_read_as_before(tmp_path):
    model = mixture(32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    config.init_lora_weights = False
    trained = peft.get_peft_model(copy.deepcopy(model), config)
    trained.save_pretrained(tmp_path)
    with patches.applied(ID):
        model.load_adapter(str(tmp_path))
    assert torch.equal(logits(model), logits(trained))
