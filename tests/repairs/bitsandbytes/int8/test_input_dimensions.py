"""INT8 layers take inputs of any number of dimensions, and compute what they compute for each row alone."""

from __future__ import annotations

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")

ID = "bitsandbytes-int8-input-dimensions"
SHAPES = [(3, 64), (2, 3, 64), (2, 3, 5, 64), (1, 1, 1, 64), (2, 1, 2, 3, 64)]


def made(threshold: float = 6.0, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return bnb.nn.Linear8bitLt(64, 32, bias=bias, has_fp16_weights=False, threshold=threshold).to("cpu").eval()


def ran(layer: torch.nn.Module, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of the input, gradient of the bias."""
    torch.manual_seed(1)
    x = torch.randn(shape) * 3
    x = x.requires_grad_()
    output = layer(x)
    layer.bias.grad = None
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return output.detach(), x.grad, layer.bias.grad


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_for_rows(shape, threshold):
    layer = made(threshold)
    with patches.applied(ID):
        output, gradient, bias = ran(layer, shape)
        rows = ran(layer, (torch.Size(shape[:-1]).numel(), 64))
    assert output.shape == (*shape[:-1], 32) and gradient.shape == shape
    assert torch.equal(output.reshape(-1, 32), rows[0]) and torch.equal(gradient.reshape(-1, 64), rows[1])
    torch.testing.assert_close(bias, rows[2])


def rows_and_columns(x: torch.Tensor, threshold: float = 0.0) -> tuple[object, ...]:
    """As ``int8_double_quant``, which no CPU has, of two dimensions alone."""
    rows, columns = (bnb.functional.int8_vectorwise_quant(part.contiguous()) for part in (x, x.t()))
    return rows[0], columns[0].t().contiguous(), rows[1], columns[1], None


def test_a_weight_that_is_trained_gets_the_gradient_of_rows(monkeypatch):
    def trained(*shape: int) -> torch.Tensor:
        torch.manual_seed(0)
        layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=True).eval()
        ran(layer, shape)
        return layer.weight.grad

    monkeypatch.setattr(bnb.functional, "int8_double_quant", rows_and_columns)
    with patches.applied(ID):
        assert torch.equal(trained(2, 3, 5, 64), trained(30, 64))


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 64)], ids=str)
def test_two_and_three_dimensions_are_the_same(shape):
    layer = made()
    expected = ran(layer, shape)
    with patches.applied(ID):
        assert all(map(torch.equal, ran(layer, shape), expected))


def test_with_every_patch_together():
    layer = made()
    with patches.applied():
        assert torch.equal(ran(layer, (2, 3, 5, 64))[0].reshape(-1, 32), ran(layer, (30, 64))[0])
