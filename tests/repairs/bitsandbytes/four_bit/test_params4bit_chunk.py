"""Parts of a 4-bit weight stay 4-bit weights, however they are asked for."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit

import patches

ID = "bitsandbytes-params4bit-chunk"

SPELLINGS = {
    "torch.chunk": lambda w: torch.chunk(w, 2),
    "torch.chunk by name": lambda w: torch.chunk(input=w, chunks=2, dim=0),
    "weight.chunk": lambda w: w.chunk(2),
    "torch.split": lambda w: torch.split(w, w.shape[0] // 2),
    "torch.split by name": lambda w: torch.split(tensor=w, split_size_or_sections=w.shape[0] // 2),
    "torch.split in sections": lambda w: torch.split(w, [w.shape[0] // 2] * 2),
    "weight.split": lambda w: w.split(w.shape[0] // 2),
    "weight.split in sections": lambda w: w.split([w.shape[0] // 2] * 2),
}


def make() -> Linear4bit:
    torch.manual_seed(0)
    return Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_keeps_class_and_state(spelling, device):
    weight = make().to(device).weight
    with patches.applied(ID):
        parts = SPELLINGS[spelling](weight)
    assert len(parts) == 2
    for part, data in zip(parts, torch.chunk(weight.data, 2)):
        assert type(part) is Params4bit and torch.equal(part.data, data)
        assert part.data.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert part.quant_state is weight.quant_state and part.bnb_quantized
        for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "requires_grad"):
            assert getattr(part, name) == getattr(weight, name)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_quantizing_a_part_leaves_the_layer(spelling, device):
    layer = make()
    with patches.applied(ID):
        part = SPELLINGS[spelling](layer.weight)[0].to(device)
    assert tuple(part.quant_state.shape) == (64, 64)
    assert layer.quant_state is None and not layer.weight.bnb_quantized


def test_other_operations_are_what_they_were(device):
    weight = make().to(device).weight
    with patches.applied(ID):
        for result in (weight.t(), weight.narrow(0, 0, 2), weight.clone(), weight + 1, weight.detach()):
            assert type(result) is torch.Tensor


def test_compiles_in_one_graph(device):
    layer = make().to(device)
    x = torch.randn(2, 64, device=device, requires_grad=True)
    expected = layer(x)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    with patches.applied(ID):
        out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(out, expected) and torch.equal(gradient, expected_gradient)
