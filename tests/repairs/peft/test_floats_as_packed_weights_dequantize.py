"""``dequantize()`` gives the weights that a model kept in floating point."""

from __future__ import annotations

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import patches
from patches.repairs.reproducers import tiny_models

ID = "peft-floats-as-packed-weights"
IDS = torch.arange(8)[None]


@pytest.mark.parametrize("kept", [True, False], ids=["in floats", "packed"])
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_the_dequantized_model_has_the_weights_that_it_had(tmp_path, kept, ran):
    tiny_models.save_llama(str(tmp_path))
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=kept)
    load = {"quantization_config": how, "device_map": "cpu", **tiny_models.in_dtype(torch.float32)}
    model = LlamaForCausalLM.from_pretrained(tmp_path, **load)
    with torch.no_grad():
        if ran:
            model(IDS)
        with patches.applied(ID):
            found = model.dequantize()
    weight, expected = (m.model.layers[0].self_attn.q_proj.weight for m in (found, plain))
    assert type(weight) is torch.nn.Parameter
    if kept:
        assert torch.equal(weight.float(), expected.float())
    else:
        off = (weight.float() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
        assert 0 < off.max() < 1 / 127, "rounded to packed weights, and not more"
