"""A weight that was dequantized in place is quantized again only where a layer of bitsandbytes has it."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import int8_vectorwise_dequant
from bitsandbytes.nn import Int8Params, Linear8bitLt

import patches

ID = "bitsandbytes-int8-dequantized-in-place"
HOMES = "bitsandbytes-int8-requantized-codes"  # which knows the layer of a weight that has run
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
RAN = pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])


def quantized(ran: bool) -> tuple[Linear8bitLt, torch.Tensor]:
    torch.manual_seed(0)
    layer = Linear8bitLt(64, 48, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu")
    weight = int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
    if ran:
        layer(X)
    return layer, weight


@RAN
@pytest.mark.parametrize("how", ["model", "weight"])
def test_a_plain_layer_keeps_its_numbers_when_it_is_moved(ran, how):
    with patches.applied(ID, HOMES):
        layer, weight = quantized(ran)
        layer.weight.data = weight.clone()
        layer.__class__ = torch.nn.Linear
        if how == "model":
            torch.nn.Sequential(layer).to("cpu")
        else:
            layer.weight = layer.weight.to("cpu")
        assert torch.equal(layer(X), torch.nn.functional.linear(X, weight))


@RAN
def test_a_linear8bit_with_new_weights_is_quantized_as_before(ran):
    with patches.applied(ID, HOMES):
        layer, _ = quantized(ran)
        layer.weight.data = new = torch.randn(48, 64)
        layer.to("cpu")
        assert layer.weight.dtype == torch.int8
        torch.testing.assert_close(int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB), new, rtol=0, atol=0.03)


def test_a_weight_of_nobody_is_quantized_as_before():
    with patches.applied(ID):
        assert Int8Params(torch.randn(4, 64), requires_grad=False).to("cpu").dtype == torch.int8
