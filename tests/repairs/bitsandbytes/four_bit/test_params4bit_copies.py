"""Copies of 4-bit weights and layers belong to themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit

import patches

ID = "bitsandbytes-params4bit-copies"
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])


def make(nested: bool = True) -> Linear4bit:
    torch.manual_seed(0)
    return Linear4bit(64, 128, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested)


def dequantized(layer: Linear4bit) -> torch.Tensor:
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: copy.deepcopy(torch.nn.Sequential(m))[0]])
def test_quantizing_a_deep_copy_leaves_the_original(how, device):
    layer = make()
    before = layer.weight.detach().clone()
    with patches.applied(ID):
        copied = how(layer).to(device)
    assert copied.weight.module is copied and copied.quant_state is copied.weight.quant_state is not None
    assert layer.weight.module is layer and layer.quant_state is layer.weight.quant_state is None
    assert torch.equal(layer.weight, before) and not layer.weight.bnb_quantized


@NESTED
def test_a_deep_copy_of_a_quantized_layer(nested, device):
    layer = make(nested).to(device)
    x = torch.randn(2, 64, device=device)
    expected, weight = layer(x), dequantized(layer)
    with patches.applied(ID):
        copied = copy.deepcopy(layer)
    assert copied.weight.module is copied
    assert copied.quant_state is copied.weight.quant_state is not layer.quant_state
    for tensor in (layer.weight.data, layer.weight.quant_state.absmax, layer.bias.data):
        tensor.zero_()
    assert torch.equal(copied(x), expected) and torch.equal(dequantized(copied), weight)


def test_a_weight_copied_alone_belongs_to_no_layer(device):
    for how in (copy.copy, copy.deepcopy):
        layer = make()
        with patches.applied(ID):
            weight = how(layer.weight).to(device)
        assert type(weight) is type(layer.weight)
        assert weight.module is None and weight.quant_state is not None
        assert layer.quant_state is None and not layer.weight.bnb_quantized


def test_tied_weights_stay_tied(device):
    model = torch.nn.Sequential(make(), make()).to(device)
    model[1].weight = model[0].weight
    with patches.applied(ID):
        copied = copy.deepcopy(model)
    assert copied[1].weight is copied[0].weight is not model[0].weight
