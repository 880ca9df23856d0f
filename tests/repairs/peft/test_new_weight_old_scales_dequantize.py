"""``dequantize()`` of a layer that got a new INT8 weight."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from transformers.integrations import bitsandbytes as integration

import patches
from patches.engine.gate import satisfied

ID = "peft-new-weight-old-scales"


def dequantized(layer: torch.nn.Module) -> torch.Tensor:
    rest = (layer.state,) if satisfied("transformers>=5") else (torch.float32, layer.state)
    return integration.dequantize_bnb_weight(layer.weight, *rest).float()


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran"])
def test_the_scales_of_a_new_weight_are_its_own(ran):
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu")
    if ran:
        layer(torch.randn(4, 64))
    with patches.applied(ID):
        patched = dequantized(layer)
    assert torch.equal(patched, dequantized(layer))  # nothing was wrong yet
    layer(torch.randn(4, 64))
    new = torch.randn(32, 64) * torch.logspace(-1, 1, 32)[:, None]
    layer.weight = bnb.nn.Int8Params(new, requires_grad=False, has_fp16_weights=False).to("cpu")
    assert (dequantized(layer) - new).norm() > 0.1 * new.norm()
    with patches.applied(ID):
        assert (dequantized(layer) - new).norm() < 0.01 * new.norm()
