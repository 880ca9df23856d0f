"""A model that was loaded from a quantized checkpoint, saved: quantized still, dequantized, merged, offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import patches
from patches.engine import gate

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ID = "transformers-save-prequantized"
NOT_AFFECTED = patches.report(ID).results[0].status is patches.Status.NOT_AFFECTED
pytestmark = [
    pytest.mark.one_in(2),
    pytest.mark.skipif(NOT_AFFECTED, reason="transformers 4 does not revert conversions when it saves"),
]

HOW = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}
MODELS = ("llama", "gpt2", "mixtral")
MENDED = gate.satisfied("transformers>=5.24")
SIZE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **SIZE))
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.MixtralConfig(num_hidden_layers=1, num_key_value_heads=2, num_local_experts=2, **SIZE)
    return transformers.MixtralForCausalLM(config)


def load(path: Path, how: str | None = None) -> Any:
    options = {} if how is None else {"quantization_config": transformers.BitsAndBytesConfig(**HOW[how])}
    return transformers.AutoModelForCausalLM.from_pretrained(path, device_map="cpu", dtype=torch.float32, **options)


def saved_quantized(folder: Path, name: str, how: str) -> Path:
    """A checkpoint of the tiny model that holds codes; quantized while it was loaded, it is saved without a patch."""
    tiny(name).save_pretrained(folder / "base")
    load(folder / "base", how).save_pretrained(folder / "quantized")
    return folder / "quantized"


def offload_map() -> dict[str, str]:
    """The first layer on disk, the rest in CPU memory."""
    on_cpu = ("model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    return {"model.layers.0": "disk", **dict.fromkeys(on_cpu, "cpu")}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) and got[name].dtype == expected[name].dtype for name in expected)


@pytest.mark.parametrize("plain", [False, True], ids=["quantized", "dequantized"])
@pytest.mark.parametrize("how", HOW)
def test_without_the_patch_nothing_is_saved(how, plain, tmp_path):
    if plain and MENDED:
        pytest.skip("transformers 5.24 saves models that were dequantized")
    model = load(saved_quantized(tmp_path, "llama", how))
    model = model.dequantize() if plain else model
    with pytest.raises(NotImplementedError):
        model.save_pretrained(tmp_path / "again")


def test_without_the_patch_nothing_is_saved_of_an_offloaded_model(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    if MENDED:
        pytest.skip("transformers 5.24 saves models that were dequantized")
    model = load(saved_quantized(tmp_path, "llama", "nf4")).dequantize()
    accelerate.dispatch_model(model, offload_map(), main_device="cpu", offload_dir=tmp_path / "off", force_hooks=True)
    with pytest.raises((RuntimeError, NotImplementedError), match="could not revert some weight conversions|^$"):
        model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_still_quantized(name, how, tmp_path):
    path = saved_quantized(tmp_path, name, how)
    with patches.applied():
        load(path).save_pretrained(tmp_path / "again")
    assert_same(tensors(tmp_path / "again"), tensors(path))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_dequantized(name, how, tmp_path):
    path = saved_quantized(tmp_path, name, how)
    with patches.applied():
        load(tmp_path / "base", how).dequantize().save_pretrained(tmp_path / "reference")
        model = load(path).dequantize()
        model.save_pretrained(tmp_path / "plain")
        assert_same(tensors(tmp_path / "plain"), tensors(tmp_path / "reference"))
        assert tensors(tmp_path / "plain").keys() == tensors(tmp_path / "base").keys()
    again = load(tmp_path / "plain")
    assert not hasattr(again.config, "quantization_config")
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("how", HOW)
def test_dequantized_in_shards(how, tmp_path):
    path = saved_quantized(tmp_path, "llama", how)
    with patches.applied(ID):
        model = load(path).dequantize()
        model.save_pretrained(tmp_path / "plain", max_shard_size="50KB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1
    assert_same(load(tmp_path / "plain").state_dict(), model.state_dict())


@pytest.mark.parametrize("first", ["merge", "dequantize"])
@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_merged(how, first, tmp_path):
    peft = pytest.importorskip("peft")
    path = saved_quantized(tmp_path, "llama", how)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with patches.applied():
        model = load(path)
        if first == "dequantize":
            model = peft.get_peft_model(model.dequantize(), config).merge_and_unload()
        else:
            model = peft.get_peft_model(model, config).merge_and_unload().dequantize()
        model.save_pretrained(tmp_path / "plain")
    assert_same(load(tmp_path / "plain").state_dict(), model.state_dict())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_offloaded(how, when, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    path = saved_quantized(tmp_path, "llama", how)
    with patches.applied():
        load(tmp_path / "base", how).dequantize().save_pretrained(tmp_path / "reference")
        model = load(path)
        model = model.dequantize() if when == "after" else model
        accelerate.dispatch_model(
            model, offload_map(), main_device="cpu", offload_dir=tmp_path / "off", force_hooks=True
        )
        model = model.dequantize() if when == "before" else model
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
        model.save_pretrained(tmp_path / "plain")
    assert_same(tensors(tmp_path / "plain"), tensors(tmp_path / "reference"))


@pytest.mark.parametrize("name", MODELS)
def test_models_that_were_not_quantized_keep_all_their_conversions(name, tmp_path):
    tiny(name).save_pretrained(tmp_path / "base")
    load(tmp_path / "base").save_pretrained(tmp_path / "unpatched")
    with patches.applied(ID):
        load(tmp_path / "base").save_pretrained(tmp_path / "patched")
    for written in ("unpatched", "patched"):
        assert_same(tensors(tmp_path / written), tensors(tmp_path / "base"))
