"""What went wrong on an accelerator only: each as the program that showed it."""

from __future__ import annotations

import accelerate
import bitsandbytes as bnb
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from tests.device.layers import KINDS, difference, inputs, rounds_alike, same, stack, step

pytestmark = pytest.mark.usefixtures("patched")


WAYS = {
    "cpu_offload": lambda model, device, folder: accelerate.cpu_offload(model, device),
    "disk_offload": lambda model, device, folder: accelerate.disk_offload(model, folder, device),
    "hook each": lambda model, device, folder: [
        add_hook_to_module(layer, AlignDevicesHook(device, offload=True)) for layer in model
    ],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "nf4" in kind])
def test_layers_that_are_offloaded_before_they_are_quantized(kind, way, device, tmp_path):
    """The second call cast floating point to the dtype of codes, under a state that looked valid: 1.5 to 2 off."""
    if not rounds_alike(kind, device):
        pytest.skip("quantized on the CPU and on the GPU")
    x = inputs(device)
    expected = step(stack(kind, device), x)
    model = stack(kind, None)
    way(model, device, tmp_path)
    for _ in range(3):
        assert same(step(model, x), expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_weights_that_are_quantized_anew_in_each_step(set_to_none, device):
    """``has_fp16_weights``: zeros in ``grad`` were taken for an accumulation, which goes on with the codes of before,
    and so did evaluation. Before bitsandbytes 0.48 no CPU trains such a layer."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False).half().to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    x = torch.randn(8, 64).to(device).half()
    for _ in range(3):
        y = layer(x)
        assert difference(y, x @ layer.weight.t()) < 0.02
        y.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.no_grad():
            assert difference(layer.eval()(x), x @ layer.weight.t()) < 0.02
        layer.train()
