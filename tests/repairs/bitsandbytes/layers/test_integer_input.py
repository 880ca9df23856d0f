"""Quantized layers refuse whole numbers, and say which layer it was."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

import patches

ID = "bitsandbytes-integer-input"
BIAS = "bitsandbytes-bias-written-in-forward"
"""INT8 without it casts its bias to whole numbers before anyone asks."""


def model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    make = {
        "nf4": lambda: Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32),
        "int8": lambda: Linear8bitLt(64, 64, has_fp16_weights=False),
    }[kind]
    return torch.nn.ModuleDict({"block": torch.nn.Sequential(make(), make())}).eval()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool], ids=str)
def test_an_error_names_the_layer(kind, dtype):
    layers = model(kind).to("cpu")
    x = torch.ones(2, 64, dtype=dtype)
    with (
        patches.applied(ID, BIAS),
        pytest.raises(TypeError, match=rf"'block\.1' expected a floating-point input, got {dtype}"),
    ):
        layers["block"][1](x)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floating_point_is_computed_as_before(kind, dtype):
    x = torch.randn(2, 64).to(dtype)
    expected = model(kind).to("cpu")["block"](x)
    with patches.applied(ID):
        assert torch.equal(model(kind).to("cpu")["block"](x), expected)


def test_compiled_it_is_one_graph():
    layers = model("nf4").to("cpu").train()
    x = torch.randn(2, 64)
    with patches.applied():
        expected = layers["block"](x)
        compiled = torch.compile(layers["block"], backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
