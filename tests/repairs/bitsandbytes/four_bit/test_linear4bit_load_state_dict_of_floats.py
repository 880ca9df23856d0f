"""4-bit layers whose weight a program has dequantized in place, saved without the quantization state of the packed one."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

import patches
from tests.repairs.bitsandbytes.four_bit.test_linear4bit_load_state_dict import layer

ID = "bitsandbytes-linear4bit-load-state-dict"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))


def dequantize(linear: torch.nn.Module) -> None:
    linear.weight.data = dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight.to(x.dtype), linear.bias)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quantized", [False, True], ids=["into nn.Linear", "into a layer that is not quantized yet"])
def test_what_it_saves_can_be_loaded(quantized, nested):
    saved = layer(0, nested=nested)
    dequantize(saved)
    live = layer(1, nested=nested, quantized=False) if quantized else torch.nn.Linear(64, 96)
    with pytest.raises(RuntimeError):
        live.load_state_dict(saved.state_dict())
    with patches.applied(ID):
        live.load_state_dict(saved.state_dict())
    assert torch.equal(live.weight.data, saved.weight.data) and torch.equal(live.bias, saved.bias)


def test_a_packed_weight_keeps_its_statistics():
    made = layer(0)
    before = made.state_dict()
    with patches.applied(ID):
        after = made.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_a_model_that_transformers_saves_is_loaded_with_the_dequantized_weight(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**options, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    load = transformers.LlamaForCausalLM.from_pretrained
    ids = torch.arange(10)[None]
    with patches.applied():
        model = load(tmp_path / "plain", quantization_config=quantization, device_map={"": "cpu"}).eval()
        dequantize(model.model.layers[0].mlp.up_proj)
        with torch.no_grad():
            expected = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved", device_map={"": "cpu"}).eval()
        with torch.no_grad():
            off = float((again(ids).logits - expected).norm() / expected.norm())
        assert off < 0.2  # 0, or as much as quantization takes where transformers quantizes that layer again
