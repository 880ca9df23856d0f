"""A new INT8 weight is read with its own scales, whatever the layer computed with before."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_module_weight

import patches
from patches.engine.gate import satisfied

ID = "peft-new-weight-old-scales"
MOVES = "bitsandbytes-int8-scales-lost-on-offload"
"""peft moves the weight to where it is, and before 0.48 bitsandbytes quantizes it again there."""
IDS = (ID,) if satisfied("bitsandbytes>=0.48") else (ID, MOVES)
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))


def with_new_weight() -> tuple[torch.nn.Sequential, torch.Tensor]:
    """A layer that ran, and got another weight."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)).requires_grad_(False)
    model.to("cpu")(X)
    new = torch.randn(32, 64) * torch.logspace(-1, 1, 32)[:, None]
    model[0].weight = bnb.nn.Int8Params(new, requires_grad=False, has_fp16_weights=False).to("cpu")
    model.is_loaded_in_8bit = True
    return model, new


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.detach().float() - expected).norm() / expected.norm()).item()


def test_it_is_dequantized_by_its_own_scales_and_the_layer_is_left_as_it_was():
    model, new = with_new_weight()
    assert off(dequantize_module_weight(model[0]), new) > 0.1
    model, new = with_new_weight()
    before = model[0].state.SCB
    with patches.applied(*IDS):
        assert off(dequantize_module_weight(model[0]), new) < 0.01
        assert model[0].state.SCB is before
        assert off(model(X), X @ new.T) < 0.02
        assert off(dequantize_module_weight(model[0]), new) < 0.01


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_is_merged_into_it(dora):
    model, new = with_new_weight()
    with patches.applied(*IDS):
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], use_dora=dora))
        assert off(adapted.merge_and_unload()(X), X @ new.T) < 0.02


@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
def test_what_was_right_is_the_same_bit_for_bit(ran):
    if ran and not satisfied("bitsandbytes>=0.48"):
        pytest.skip("before 0.48 it is not right: the move of peft quantizes packed weights again")
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu")
    if ran:
        layer(X)
    expected = dequantize_module_weight(layer)
    with patches.applied(*IDS):
        assert torch.equal(dequantize_module_weight(layer), expected)
