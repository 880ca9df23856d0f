"""What is in a weight decides how accelerate brings it: numbers as numbers, packed weights as packed weights."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn import Linear4bit, Linear8bitLt

import patches

ID = "accelerate-dequantized-in-place"
HOMES = "bitsandbytes-int8-scales-lost-on-offload"  # which knows the layer of a weight that has run; 0.48.0 and 0.48.1 offload none without it
META = "bitsandbytes-params4bit-meta"  # without which packed 4-bit weights cannot be offloaded
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
KINDS = pytest.mark.parametrize("bits", [4, 8])


def layer_of(bits: int) -> torch.nn.Module:
    torch.manual_seed(0)
    made = Linear4bit(64, 48, bias=False, compute_dtype=torch.float32, quant_type="nf4") if bits == 4 else Linear8bitLt(
        64, 48, bias=False, has_fp16_weights=False
    )  # fmt: skip
    return made.requires_grad_(False).to("cpu")


def dense(layer: torch.nn.Module) -> torch.Tensor:
    weight = layer.weight
    if isinstance(layer, Linear4bit):
        return dequantize_4bit(weight.data, weight.quant_state)
    return int8_vectorwise_dequant(weight.data, layer.state.SCB if weight.SCB is None else weight.SCB)


def offload(model: torch.nn.Module, folder: str, where: str) -> None:
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, folder, execution_device=torch.device("cpu"))


@KINDS
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
@pytest.mark.parametrize("how", ["class", "forward"])
def test_a_layer_that_was_dequantized_in_place_is_offloaded_as_what_it_holds(bits, where, ran, how, tmp_path):
    with patches.applied(ID, HOMES):
        layer = layer_of(bits)
        if ran:
            layer(X)
        weight = dense(layer)
        layer.weight.data = weight.clone()
        if how == "class":
            layer.__class__ = torch.nn.Linear
        else:
            layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
        model = torch.nn.Sequential(layer)
        offload(model, str(tmp_path), where)
        for _ in range(2):
            assert torch.equal(model(X), torch.nn.functional.linear(X, weight))


@KINDS
def test_packed_weights_are_offloaded_as_before(bits):
    def outputs() -> torch.Tensor:
        model = torch.nn.Sequential(layer_of(bits))
        cpu_offload(model, execution_device=torch.device("cpu"))
        return model(X)

    with patches.applied(META, HOMES):
        expected = outputs()
    with patches.applied(ID, META, HOMES):
        assert torch.equal(outputs(), expected)


def test_a_linear8bit_with_new_weights_is_quantized_as_before():
    new = torch.randn(48, 64)

    def outputs() -> torch.Tensor:
        layer = layer_of(8)
        layer.weight.data = new.clone()
        model = torch.nn.Sequential(layer)
        cpu_offload(model, execution_device=torch.device("cpu"))
        return model(X)

    expected = outputs()
    with patches.applied(ID):
        assert torch.equal(outputs(), expected)


def test_codes_that_were_cast_to_floats_are_an_error_that_names_the_layer():
    with patches.applied(ID, HOMES):
        layer = layer_of(8)
        layer(X)
        layer.weight.data = layer.weight.data.half()
        with pytest.raises(RuntimeError, match="Linear8bitLt '0' was replaced by integers up to 127"):
            cpu_offload(torch.nn.Sequential(layer), execution_device=torch.device("cpu"))
