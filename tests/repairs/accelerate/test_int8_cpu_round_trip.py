"""Weights that are already on their way to a device without quantization needs keep their codes and scales."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import set_module_tensor_to_device

import patches
from patches.repairs.accelerate.int8_cpu_round_trip import _needs_accelerator

ID = "accelerate-int8-cpu-round-trip"


def quantized() -> bnb.nn.Linear8bitLt:
    torch.manual_seed(0)
    return bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()


def test_codes_and_scales_handed_over_for_the_cpu_arrive():
    layer, x = quantized(), torch.randn(2, 64)
    codes, scales = layer.weight.data.clone(), layer.weight.SCB.clone()
    expected = quantized()(x)

    def put() -> None:
        set_module_tensor_to_device(layer, "weight", "meta")
        set_module_tensor_to_device(layer, "weight", "cpu", value=codes, fp16_statistics=scales)

    with pytest.raises((RuntimeError, AttributeError)):
        put()
    with patches.applied(ID, "bitsandbytes-int8-scales-lost-on-offload"):
        put()
        assert torch.equal(layer(x), expected)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator, the round trip does no harm")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_alone_the_outputs_of_an_offloaded_model_are_right(warm, tmp_path):
    x, expected = torch.randn(2, 64), quantized()
    expected = expected(expected(x))
    with patches.applied(ID):
        model = torch.nn.Sequential(quantized(), quantized())
        if warm:
            model(x)
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path, force_hooks=True)
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator, it is still asked to quantize")
def test_a_float_weight_is_quantized_on_the_cpu_where_there_is_nothing_else():
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, device="meta")
    weight = torch.randn(64, 64)
    with patches.applied(ID):
        set_module_tensor_to_device(layer, "weight", "cpu", value=weight)
    expected = bnb.nn.Int8Params(weight.half(), requires_grad=False).to("cpu")
    assert torch.equal(layer.weight.data, expected.data) and torch.equal(layer.weight.SCB, expected.SCB)


def test_an_accelerator_is_asked_to_quantize_and_for_nothing_else(monkeypatch):
    values = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int8)
    for there, expected in ((True, [True, False]), (False, [False, False])):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        assert [_needs_accelerator(value) for value in values] == expected
