"""Copies of 4-bit weights that are on meta."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit

import patches

ID = "bitsandbytes-params4bit-copies"
COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])


def make(quant_storage: torch.dtype = torch.uint8, nested: bool = True) -> Linear4bit:
    torch.manual_seed(0)
    return Linear4bit(
        64, 128, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested, quant_storage=quant_storage
    )


@COPIES
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_weight_that_is_not_quantized(copied, requires_grad):
    with torch.device("meta"):
        weight = make().weight.requires_grad_(requires_grad)
    with patches.applied(ID):
        got = copied(weight)
    assert type(got) is Params4bit and got is not weight and got.is_meta
    assert (got.shape, got.dtype, got.requires_grad) == (weight.shape, weight.dtype, requires_grad)
    assert vars(got).keys() == vars(weight).keys() and not got.bnb_quantized


@COPIES
@pytest.mark.parametrize("quant_storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_a_quantized_weight_and_its_statistics(copied, quant_storage, device):
    layer = make(quant_storage).to(device)
    absmax = layer.weight.quant_state.absmax.clone()
    with patches.applied(ID, "bitsandbytes-params4bit-meta"):
        weight = layer.weight.to("meta")
        got = copied(weight)
        assert got.is_meta and got.bnb_quantized
        assert (got.shape, got.dtype, got.quant_storage) == (weight.shape, quant_storage, quant_storage)
        shared = got.quant_state is weight.quant_state
        assert shared is (copied is copy.copy) and torch.equal(got.quant_state.absmax, absmax)


@COPIES
def test_a_weight_with_values_is_copied_as_before(copied, device):
    weight = make().to(device).weight
    before = copied(weight)
    with patches.applied(ID):
        after = copied(weight)
    assert torch.equal(after, before) and after.device == before.device and type(after) is Params4bit
    shares = after.data_ptr() == weight.data_ptr()
    assert shares is (copied is copy.copy)


@COPIES
def test_a_weight_with_values_is_copied_where_new_tensors_are_on_meta(copied, device):
    weight = make().to(device).weight
    with patches.applied(ID), torch.device("meta"):
        after = copied(weight)
    assert torch.equal(after, weight) and after.device == weight.device and type(after) is Params4bit
    assert torch.equal(after.quant_state.absmax, weight.quant_state.absmax)
