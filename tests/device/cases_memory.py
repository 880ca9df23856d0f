"""What is offloaded is on the device for its own forward and its own backward, in bytes counted and in a limit kept.

Between a forward and its backward autograd holds the weight of a linear layer, plain or quantized, offloaded or not;
so training counts with each layer checkpointed, as ``gradient_checkpointing_enable`` does with decoder layers. The
statistics of 4-bit weights are never offloaded by accelerate: what is counted is beside them.
"""

from __future__ import annotations

import gc

import accelerate
import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.device import watch
from tests.device.layers import KINDS, inputs, same, stack, step

pytestmark = pytest.mark.usefixtures("patched")

LAYERS = 48
DEQUANTIZED = 64 * 64 * 4
"""One weight in float32, which a product needs for a moment."""


class Checkpointed(torch.nn.Module):
    """Each layer a checkpoint of its own."""

    def __init__(self, layers: torch.nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = layers, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def size_of(kind: str, device: str, layers: int) -> int:
    """Bytes of so many layers on the device."""
    stack(kind, device, 1)  # code books are made once
    before = watch.held()
    whole = stack(kind, device, layers)
    size = watch.held() - before
    del whole
    return size


def offloaded(kind: str, device: str, layers: int = LAYERS) -> torch.nn.Sequential:
    """Layers that are offloaded, and have settled."""
    model = accelerate.cpu_offload(stack(kind, device, layers), device)
    with torch.no_grad():
        model(inputs(device))
    return model


def test_evaluation(kind, device):
    one, x = size_of(kind, device, 1), inputs(device)
    model = offloaded(kind, device)
    before = watch.held()
    with torch.no_grad(), watch.peak() as most:
        model(x)
    assert watch.held() == before
    assert most[0] <= one + DEQUANTIZED + 8 * x.nbytes


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_training(kind, reentrant, device):
    one, x = size_of(kind, device, 1), inputs(device)
    model = Checkpointed(offloaded(kind, device), reentrant)
    before = watch.held()
    leaf = x.clone().requires_grad_()
    activations = (LAYERS + 2) * x.nbytes
    with watch.peak() as forward:
        y = model(leaf)
    assert watch.held() - before <= activations, "codes are held for the backward"
    with watch.peak() as backward:
        y.square().sum().backward()
    assert forward[0] <= activations + one + DEQUANTIZED + 8 * x.nbytes
    assert backward[0] <= one + DEQUANTIZED + 8 * x.nbytes


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "no early stop"])
def test_after_non_reentrant_checkpointing_nothing_stays(kind, early_stop, device):
    """With early stop the recomputation ends by an exception inside of the last layer of each checkpoint."""
    model, x = Checkpointed(offloaded(kind, device, 4), reentrant=False), inputs(device)
    before = watch.held()
    with set_checkpoint_early_stop(early_stop):
        step(model, x)
    assert all(layer.weight.is_meta for layer in model.layers)
    assert watch.held() == before


def test_what_does_not_fit_whole_trains_offloaded(kind, device):
    x = inputs(device)[:1]
    expected = step(Checkpointed(stack(kind, device, LAYERS), reentrant=True), x)
    with watch.limited_to(int(0.7 * size_of(kind, device, LAYERS))):
        with pytest.raises(torch.OutOfMemoryError):
            stack(kind, device, LAYERS)
        gc.collect()  # what the error's traceback kept
        model = accelerate.cpu_offload(stack(kind, "cpu", LAYERS), device)
        assert same(step(Checkpointed(model, reentrant=True), x), expected)
