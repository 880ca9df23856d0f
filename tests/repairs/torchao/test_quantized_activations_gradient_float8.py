"""The gradient through layers that quantize their activations to fp8, on weights that no GPU is needed for."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")

from torchao.quantization.granularity import PerRow, PerTensor

import patches

ID = "torchao-quantized-activations-gradient"


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 64, requires_grad=True)


def float8_layer(granularity, **kwargs) -> torch.nn.Linear:
    """One as ``Float8DynamicActivationFloat8WeightConfig`` makes it, which asks for a GPU before it does."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor

    module = importlib.import_module("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    fast = Float8MMConfig(use_fast_accum=True)
    activations = module.QuantizeTensorToFloat8Kwargs(granularity=granularity, mm_config=fast, **kwargs)
    weight = Float8Tensor.from_hp(
        layer.weight.data, granularity=granularity, mm_config=fast, act_quant_kwargs=activations
    )
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=["rows", "tensor"])
def test_float8_has_a_backward(granularity):
    layer = float8_layer(granularity)
    x = inputs()
    before = layer(x)
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_mm is not implemented"):
        before.sum().backward()
    with patches.applied(ID):
        assert torch.equal(layer(x), before)
        grad, bias = torch.autograd.grad(layer(x).sum(), (x, layer.bias))
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], grad)
    torch.testing.assert_close(grad, torch.ones(2, 5, 48) @ layer.weight.dequantize())
    assert torch.equal(bias, torch.full((48,), 10.0))


def test_float8_that_clips_what_it_measures_stays_as_it_was():
    layer = float8_layer(PerRow(), hp_value_ub=0.5)
    with patches.applied(ID), pytest.raises(RuntimeError, match="derivative for aten::_scaled_mm"):
        layer(inputs()).sum().backward()
