"""Weights that an INT8 or 4-bit layer holds in floating point are the weights, for every reader of peft."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_module_weight

import patches

ID = "peft-floats-as-packed-weights"
RAN = pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))


def kept_in_floats(ran: bool) -> tuple[torch.nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear8bitLt(64, 48, bias=False, has_fp16_weights=True)).requires_grad_(False).to("cpu")
    weight = model[0].weight.detach().clone()
    if ran:
        model(X)
    model.is_loaded_in_8bit = True
    return model, weight


def adapted(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, **options))


@RAN
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_merge_into_weights_in_floating_point_is_that_into_a_plain_layer(dora, ran):
    model, weight = kept_in_floats(ran)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).requires_grad_(False)
    plain[0].weight.data = weight.clone()
    expected = adapted(plain, use_dora=dora).merge_and_unload()[0].weight
    with patches.applied(ID):
        merged = adapted(model, use_dora=dora).merge_and_unload()[0].weight
    torch.testing.assert_close(merged.data.float(), expected.data)


@RAN
def test_the_magnitude_of_dora_is_the_norm_of_the_weight(ran):
    model, weight = kept_in_floats(ran)
    with patches.applied(ID):
        layer = get_peft_model(model, LoraConfig(r=4, target_modules=["0"], use_dora=True)).base_model.model[0]
    torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight.data, weight.norm(dim=1))


@pytest.mark.parametrize("cls", [Linear4bit, Linear8bitLt])
def test_a_layer_that_was_dequantized_in_place_has_the_weight_that_it_holds(cls):
    torch.manual_seed(0)
    layer = cls(64, 64, bias=False, **({"quant_type": "nf4"} if cls is Linear4bit else {"has_fp16_weights": False})).to(
        "cpu"
    )
    packed = layer.weight.data
    dense = (
        dequantize_4bit(packed, layer.weight.quant_state)
        if cls is Linear4bit
        else int8_vectorwise_dequant(packed, layer.weight.SCB)
    )
    with patches.applied(ID):
        assert torch.equal(dequantize_module_weight(layer), dense), "packed weights are dequantized as before"
        layer.weight.data = dense.clone()
        assert torch.equal(dequantize_module_weight(layer), dense)
        assert layer.weight.dtype == dense.dtype and torch.equal(layer.weight.data, dense), "left as it was"


def test_dora_compiles_in_one_graph_with_weights_in_floating_point():
    model, weight = kept_in_floats(ran=False)
    with patches.applied(ID, "peft-dora-dequantize"):
        compiled = torch.compile(lambda layer: dequantize_module_weight(layer) * 2, backend="eager", fullgraph=True)
        assert torch.equal(compiled(model[0]), weight * 2)
