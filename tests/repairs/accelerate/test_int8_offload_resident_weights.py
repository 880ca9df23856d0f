"""Offloaded INT8 layers are right, and leave nothing on the execution device, with this patch alone."""

from __future__ import annotations

import accelerate
import bitsandbytes as bnb
import pytest
import torch

import patches
from patches.engine.gate import satisfied

ID = "accelerate-int8-offload-resident-weights"


@pytest.mark.skipif(satisfied("bitsandbytes<0.48"), reason="before 0.48 a move quantizes packed weights again")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_alone_outputs_are_right_and_nothing_stays(warm):
    torch.manual_seed(0)
    layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False) for _ in range(2)]
    model, x = torch.nn.Sequential(*layers).to("cpu").eval(), torch.randn(2, 64)
    with torch.no_grad(), patches.applied(ID):
        if warm:
            model(x)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        outputs = [model(x), model(x)]
        assert all(layer.weight.is_meta and layer.state.CB is None for layer in layers)
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert all(torch.equal(y, model(x)) for y in outputs)
