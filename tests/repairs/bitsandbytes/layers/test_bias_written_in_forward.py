"""A forward leaves the bias as it is, and computes with it in the dtype of the product."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

import patches

ID = "bitsandbytes-bias-written-in-forward"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def four_bit(device: str, compute: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return Linear4bit(64, 64, compute_dtype=compute, quant_type="nf4", compress_statistics=False).to(device)


def eight_bit(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0).to(device)


LAYERS = pytest.mark.parametrize("make", [four_bit, eight_bit])


@LAYERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_leaves_the_bias(make, dtype, device):
    layer = make(device)
    before = layer.bias.detach().clone()
    with patches.applied(ID):
        layer(torch.randn(3, 64, dtype=dtype, device=device))
    assert layer.bias.dtype == torch.float32
    assert torch.equal(layer.bias, before)


@LAYERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_that_needs_no_cast_gives_the_same_bits(make, dtype, device):
    layer = make(device)
    layer.bias.data = layer.bias.data.to(dtype)
    if make is four_bit:
        layer.compute_dtype = dtype
    x = torch.randn(3, 64, dtype=dtype, device=device, requires_grad=True)
    layer(x.detach())  # 8-bit layers settle their state in the first call

    def run() -> tuple[torch.Tensor, ...]:
        out = layer(x)
        return (out, *torch.autograd.grad(out.float().square().sum(), (x, layer.bias)))

    unpatched = run()
    with patches.applied(ID):
        patched = run()
    assert all(map(torch.equal, patched, unpatched))


def test_one_narrow_call_does_not_round_the_wide_ones(device):
    """A 4-bit layer that computes in fp32: its fp16 inputs used to leave an fp16 bias."""
    layer = four_bit(device, compute=torch.float32)
    layer.bias.data += 1000.0
    x = torch.randn(3, 64, device=device)
    expected = copy.deepcopy(layer)(x)
    with patches.applied(ID):
        layer(x.half())
        assert torch.equal(layer(x), expected)


@LAYERS
def test_a_trained_bias_keeps_the_dtype_of_its_gradient(make, device):
    layer = make(device)
    with patches.applied(ID):
        layer(torch.randn(3, 64, dtype=torch.bfloat16, device=device)).float().sum().backward()
    assert layer.bias.grad.dtype == torch.float32
    assert torch.equal(layer.bias.grad, torch.full((64,), 3.0, device=device))


@pytest.mark.parametrize("warm", [False, True])
def test_compiles_in_one_graph(warm, device):
    """Unpatched: "Failed to mutate tensor data attribute to different dtype"."""
    layer = four_bit(device)
    x = torch.randn(3, 64, dtype=torch.bfloat16, device=device, requires_grad=True)

    def run(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        out = module(x)
        return (out, *torch.autograd.grad(out.float().square().sum(), (x, layer.bias)))

    with patches.applied(ID):
        if warm:
            layer(x)
        compiled = run(torch.compile(layer, backend="aot_eager", fullgraph=True))
        assert all(map(torch.equal, compiled, run(layer)))
