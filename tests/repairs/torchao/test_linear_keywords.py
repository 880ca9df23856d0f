"""F.linear with weights of torchao takes its arguments by keyword."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

import patches
from patches.repairs.torchao.linear_keywords import by_position

ID = "torchao-linear-keywords"
GRADIENT = "torchao-quantized-activations-gradient"
CONFIGS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig")
X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
linear = torch.nn.functional.linear


def layer(config: str) -> torch.nn.Linear:
    torch.manual_seed(0)
    found = torch.nn.Linear(64, 32)
    quantization.quantize_(found, getattr(quantization, config)())
    return found


CALLS = {
    "bias": lambda x, w, b: linear(x, w, bias=b),
    "weight and bias": lambda x, w, b: linear(x, bias=b, weight=w),
    "all": lambda x, w, b: linear(bias=b, weight=w, input=x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("config", CONFIGS)
def test_keywords_give_what_places_give(config, call):
    found = layer(config)
    expected = linear(X, found.weight, found.bias)
    with patches.applied(ID):
        assert torch.equal(CALLS[call](X, found.weight, found.bias), expected)
        assert torch.equal(linear(X, found.weight, found.bias), expected)
        assert torch.equal(linear(X, found.weight, bias=None), linear(X, found.weight))
        assert not torch.equal(linear(X, found.weight), expected)


def test_without_the_patch_the_bias_is_left_out():
    found = layer(CONFIGS[0])
    assert torch.equal(linear(X, found.weight, bias=found.bias), linear(X, found.weight))


def test_other_functions_keep_their_keywords():
    """The third argument of ``layer_norm`` is its weight."""
    args, kwargs = (X, (64,)), {"weight": X[0], "bias": X[1]}
    assert by_position(torch.nn.functional.layer_norm, args, kwargs) == (args, kwargs)


def test_bad_calls_stay_errors():
    found = layer(CONFIGS[0])
    with patches.applied(ID):
        for call in (lambda: linear(X, bias=found.bias), lambda: linear(X, found.weight, found.bias, bias=found.bias)):
            with pytest.raises((TypeError, IndexError)):
                call()


@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_and_compiled_calls(config):
    found = layer(config)

    def gradients(call) -> tuple[torch.Tensor, ...]:
        x, bias = X.clone().requires_grad_(), found.bias.detach().clone().requires_grad_()
        return torch.autograd.grad(call(x, found.weight, bias).square().sum(), (x, bias))

    with patches.applied(ID, GRADIENT):
        expected = gradients(lambda x, w, b: linear(x, w, b))
        compiled = torch.compile(CALLS["bias"], backend="aot_eager", fullgraph=True)
        for call in (CALLS["bias"], compiled):
            for found_gradient, gradient in zip(gradients(call), expected, strict=True):
                torch.testing.assert_close(found_gradient, gradient)
