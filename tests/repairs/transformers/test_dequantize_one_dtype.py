"""A k-bit model from disk, prepared, given an adapter, merged and dequantized, computes in one dtype."""

from __future__ import annotations

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ID = "transformers-dequantize-one-dtype"
TOKENS = torch.arange(16)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with biases, in bfloat16."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        attention_bias=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def merged(folder, bits, prepared):
    how = {
        4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
        8: {"load_in_8bit": True},
    }[bits]
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(**how),
        device_map="cpu",
        dtype=torch.bfloat16,
    )
    if prepared:
        model = peft.prepare_model_for_kbit_training(model)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval().merge_and_unload()
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_prepared(folder, bits, tmp_path):
    model = merged(folder, bits, prepared=True)
    layer = model.model.layers[0].mlp.up_proj
    if bits == 4:
        exact = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    # 0.49 forgets in a forward from which dtype the weight was quantized
    with torch.no_grad(), patches.applied(ID, "bitsandbytes-matmul4bit-dtype-write"):
        quantized = model(TOKENS).logits.float()
        plain = model.dequantize()
        logits = plain(TOKENS).logits
    assert {p.dtype for p in plain.parameters()} == {torch.float32} == {logits.dtype}
    assert ((logits - quantized).norm() / quantized.norm()).item() < 0.02
    if bits == 4:
        assert torch.equal(plain.model.layers[0].mlp.up_proj.weight, exact)
    plain.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(again(TOKENS).logits, logits)


def test_not_prepared_is_as_before(folder):
    def logits():
        with torch.no_grad():
            return merged(folder, 4, prepared=False).dequantize()(TOKENS).logits

    expected = logits()
    with patches.applied(ID):
        assert torch.equal(logits(), expected)
    assert expected.dtype is torch.bfloat16


def test_the_dtype_that_is_asked_for(folder):
    with patches.applied(ID):
        plain = merged(folder, 4, prepared=True).dequantize(dtype=torch.float16)
    assert plain.model.layers[0].mlp.up_proj.weight.dtype is torch.float16


def test_several_dtypes_are_left_to_the_config(folder):
    model = merged(folder, 4, prepared=True)
    model.lm_head.half()
    with patches.applied(ID):
        plain = model.dequantize()
    assert plain.model.layers[0].mlp.up_proj.weight.dtype is torch.bfloat16
