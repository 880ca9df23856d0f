"""Whether a 4-bit weight holds packed bits is asked of what it holds, not of what it once was marked as."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit

import patches
from patches.engine.gate import satisfied

LOAD = "bitsandbytes-linear4bit-load-state-dict"
CAST = "bitsandbytes-params4bit-cast"
X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
NEEDS_STORAGE = pytest.mark.skipif(satisfied("bitsandbytes<0.47"), reason="0.46 packs into uint8 alone on a CPU")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALF, BFLOAT16, SINGLE = FLOATS
CASTS = [(HALF, BFLOAT16), (BFLOAT16, HALF), (SINGLE, HALF), (SINGLE, BFLOAT16)]
"""From which dtype to which: the others keep all bits."""


def layer(seed: int = 0, storage: torch.dtype = torch.uint8, nested: bool = True) -> Linear4bit:
    torch.manual_seed(seed)
    options = {"compress_statistics": nested, "quant_type": "nf4", "quant_storage": storage}
    return Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, **options).to("cpu")


def dequantized(seed: int = 0) -> Linear4bit:
    found = layer(seed)
    found.weight.data = dequantize_4bit(found.weight.data, found.weight.quant_state)
    return found


def another_class(it: Linear4bit) -> torch.nn.Module:
    it.__class__ = torch.nn.Linear
    return it


def own_forward(it: Linear4bit) -> torch.nn.Module:
    it.forward = lambda x: torch.nn.functional.linear(x, it.weight, it.bias)
    return it


@pytest.mark.parametrize("change", [another_class, own_forward])
@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "to"])
def test_a_weight_that_was_dequantized_in_place_is_cast_with_its_model(change, how):
    def cast(module: torch.nn.Module) -> torch.nn.Module:
        return module.to(torch.float16) if how == "to" else getattr(module, how)()

    expected = cast(change(dequantized()))
    with patches.applied(CAST):
        found = cast(change(dequantized()))
        assert found.weight.dtype is expected.weight.dtype is not torch.float32
        x = X.to(expected.weight.dtype)
        assert torch.equal(found(x), expected(x))


def test_a_weight_that_was_dequantized_in_place_loads_its_own_parameters():
    expected = dequantized(1)
    with patches.applied(LOAD):
        found = dequantized()
        found.load_state_dict(dict(expected.named_parameters()), strict=False)
    assert torch.equal(found.weight.data, expected.weight.data)


@NEEDS_STORAGE
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("stored, through", CASTS, ids=str)
@pytest.mark.parametrize("into", [torch.uint8, torch.bfloat16, torch.float16], ids=str)
def test_packed_bits_that_were_cast_are_refused(stored, through, into, nested):
    saved = layer(0, stored, nested).state_dict()
    with patches.applied(LOAD):
        for back in (False, True):
            changed = {k: v.to(through) if k == "weight" else v for k, v in saved.items()}
            if back:
                changed["weight"] = changed["weight"].to(stored)
            found = layer(1, into, nested)
            before = found(X)
            with pytest.raises(RuntimeError, match="cast|bytes, expected"):
                found.load_state_dict(changed)
            assert torch.equal(found(X), before)


@NEEDS_STORAGE
@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("weights", ["random", "zeros", "ones", "positive"])
def test_packed_bits_as_they_were_saved_are_not(stored, quant_type, weights):
    from patches.quantized.four_bit.quant_state_dict import refuse_cast

    torch.manual_seed(0)
    weight = {"random": torch.randn(64, 64), "zeros": torch.zeros(64, 64), "ones": torch.ones(64, 64),
              "positive": torch.rand(64, 64)}[weights]  # fmt: skip
    codes, _ = bnb.functional.quantize_4bit(weight, quant_type=quant_type, quant_storage=stored)
    refuse_cast("weight", codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("meta", [True, False])
def test_statistics_are_loaded_as_they_are_whatever_the_default_dtype_is(dtype, meta):
    with patches.applied(LOAD):
        saved = layer()
        expected = saved(X)
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta" if meta else "cpu"):
                found = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            found.load_state_dict(saved.state_dict(), assign=meta)
        finally:
            torch.set_default_dtype(torch.float32)
        assert found.weight.quant_state.offset.dtype is torch.float32
        assert torch.equal(found(X), expected)
