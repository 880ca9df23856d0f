"""Of a quantized checkpoint the file decides what is quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

from . import asking  # noqa: E402

ID = "transformers-skip-list-of-checkpoint"
LISTS = (None, [], ["lm_head"], ["mlp", "lm_head"], ["language_model.model.layers.0.mlp"], ["model.layers.0"])


def with_list(folder: Path, names: list[str] | None) -> None:
    """Write ``names`` into the configuration that lies in ``folder``."""
    file = folder / "config.json"
    stored = json.loads(file.read_text())
    stored["quantization_config"]["llm_int8_skip_modules"] = names
    file.write_text(json.dumps(stored))


def saved(folder: Path, how: str, **save) -> torch.nn.Module:
    asking.llama(folder / "plain")
    skip = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"]
    model = asking.load(folder / "plain", {**asking.HOW[how], "llm_int8_skip_modules": skip})
    model.save_pretrained(folder / "packed", **save)
    return model


@pytest.mark.parametrize("how", asking.HOW)
def test_whatever_list_stands_in_the_configuration(tmp_path, how):
    model = saved(tmp_path, how, max_shard_size="20kB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    expected = asking.logits(asking.load(tmp_path / "packed"))  # the list that was saved is right
    for names in LISTS:
        with_list(tmp_path / "packed", names)
        with patches.applied(ID):
            again = asking.load(tmp_path / "packed")
            assert asking.quantized(again) == asking.quantized(model) and asking.plain(again) == asking.plain(model)
            assert torch.equal(asking.logits(again), expected)


def test_saved_again_and_loaded(tmp_path):
    model = saved(tmp_path, "nf4")
    with_list(tmp_path / "packed", [])
    with patches.applied(ID, "transformers-save-prequantized"):
        asking.load(tmp_path / "packed").save_pretrained(tmp_path / "again")
        again = asking.load(tmp_path / "again")
    assert asking.quantized(again) == asking.quantized(model)
    assert torch.equal(asking.logits(again), asking.logits(model))  # 4 bits, which every release reads back exactly


@pytest.mark.parametrize("how", asking.HOW)
def test_a_list_that_agrees_gives_the_same_model(tmp_path, how):
    saved(tmp_path, how)
    expected = asking.load(tmp_path / "packed")
    with patches.applied(ID):
        model = asking.load(tmp_path / "packed")
    assert model.config.to_dict() == expected.config.to_dict()
    assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
    assert torch.equal(asking.logits(model), asking.logits(expected))


def test_adapters_and_merging_on_it(tmp_path):
    peft = pytest.importorskip("peft")
    saved(tmp_path, "nf4")
    with_list(tmp_path / "packed", [])
    with patches.applied(ID):
        model = asking.load(tmp_path / "packed")
        tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
        before = asking.logits(tuned)
        merged = tuned.merge_and_unload()
    assert (asking.logits(merged) - before).norm() < 0.2 * before.norm()
    assert not [
        p for p in asking.quantized(merged) if getattr(merged.get_submodule(p).weight, "quant_state", 0) is None
    ]


@pytest.mark.parametrize(
    ("lost", "message"),
    [("quant_state", "packed weights for 'model.layers.0.mlp.down_proj' but no quantization state"),
     ("weight", "a quantization state for 'model.layers.0.mlp.down_proj' but no weight")],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path, lost, message):
    saved(tmp_path, "nf4")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = safetensors.load_file(file)
    layer = "model.layers.0.mlp.down_proj.weight"
    gone = [name for name in tensors if name.startswith(layer) and (name == layer) == (lost == "weight")]
    kept = {name: tensor for name, tensor in tensors.items() if name not in gone}
    safetensors.save_file(kept, file, metadata={"format": "pt"})
    with patches.applied(ID), pytest.raises(ValueError, match=message):
        asking.load(tmp_path / "packed")


@pytest.mark.parametrize("how", asking.HOW)
def test_stacked_experts_that_a_checkpoint_holds_stay_stacked(tmp_path, how):
    """transformers parts the experts of a Llama 4 that is quantized already, whatever its file holds."""
    size = {"hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(vocab_size=32, num_local_experts=2, pad_token_id=0, **size)
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path / "plain")
    with patches.applied():
        model = asking.load(tmp_path / "plain", asking.HOW[how], "Llama4ForCausalLM", torch_dtype=torch.float32)
        model.save_pretrained(tmp_path / "packed")
        again = asking.load(tmp_path / "packed", kind="Llama4ForCausalLM", torch_dtype=torch.float32)
        assert torch.equal(asking.logits(again), asking.logits(model))
    assert asking.quantized(again) == asking.quantized(model) != []
    stacked = {name for name, parameter in again.named_parameters() if parameter.dim() == 3}
    assert stacked == {name for name, parameter in model.named_parameters() if parameter.dim() == 3} != set()
