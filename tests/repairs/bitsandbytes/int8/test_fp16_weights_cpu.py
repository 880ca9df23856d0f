"""``has_fp16_weights=True`` on a CPU: trains in any shape, evaluates, and never on an older weight's codes.

Also of ``bitsandbytes-int8-stale-packed-weights``.
"""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

import patches

CPU = "bitsandbytes-int8-fp16-weights-cpu"
STALE = "bitsandbytes-int8-stale-packed-weights"

pytestmark = pytest.mark.skipif(
    not hasattr(bnb.autograd._functions, "MatMul8bitFp") or hasattr(bnb.autograd._functions, "ipex_cpu"),
    reason="before 0.48 no CPU kernel trains such a weight",
)


def linear() -> bnb.nn.Linear8bitLt:
    torch.manual_seed(0)
    return bnb.nn.Linear8bitLt(64, 32).to("cpu")


def step(layer: bnb.nn.Linear8bitLt, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_(True)
    y = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_sequences_gets_the_gradients_of_its_rows(dtype):
    x = torch.randn(2, 3, 64).to(dtype)
    rows = step(linear().to(dtype), x.flatten(0, 1))
    with patches.applied(CPU):
        found = step(linear().to(dtype), x)
    for a, b in zip(found, rows):
        assert torch.allclose(a.reshape(b.shape).float(), b.float(), rtol=2e-2, atol=1e-2)
    assert torch.equal(found[2], rows[2])


def test_rows_alone_stay_bit_identical():
    x = torch.randn(6, 64)
    before = step(linear(), x)
    with patches.applied(CPU, STALE):
        assert all(map(torch.equal, step(linear(), x), before))


def test_evaluation_between_training_steps():
    layer, x = linear(), torch.randn(2, 3, 64)
    with patches.applied(CPU, STALE):
        step(layer, x)
        with torch.no_grad():
            layer.weight.normal_()
            y = layer.eval()(x)
            expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
            assert float((y - expected).norm() / expected.norm()) < 0.02
            layer.weight.mul_(0.5)
            assert not torch.equal(layer(x), y)


@pytest.mark.parametrize("update", ["in place", "data", "unseen"])
def test_a_zeroed_gradient_does_not_bring_back_stale_codes(update):
    def relative_error() -> float:
        layer, x = linear(), torch.randn(4, 64)
        step(layer, x)
        new = torch.randn(32, 64)
        if update == "in place":
            with torch.no_grad():
                layer.weight.copy_(new)
        elif update == "data":
            layer.weight.data = new
        else:  # as an optimizer kernel writes: no version counter is raised
            layer.weight.data.numpy()[:] = new.numpy()
        layer.zero_grad(set_to_none=False)
        expected = torch.nn.functional.linear(x, new, layer.bias)
        return float((layer(x) - expected).detach().norm() / expected.detach().norm())

    assert relative_error() > 0.1
    with patches.applied(STALE):
        assert relative_error() < 0.02


def copy_through_data(weight: torch.nn.Parameter, new: torch.Tensor) -> None:
    weight.data.copy_(new)


def write_with_numpy(weight: torch.nn.Parameter, new: torch.Tensor) -> None:
    weight.detach().numpy()[:] = new.numpy()


def refill_a_buffer(weight: torch.nn.Parameter, new: torch.Tensor) -> None:
    torch.as_tensor(weight.data.numpy()).copy_(new)


def turn_two_signs(weight: torch.nn.Parameter, new: torch.Tensor) -> None:
    weight.data[3, [1, 3]] *= -1


@pytest.mark.parametrize("write", [copy_through_data, write_with_numpy, refill_a_buffer, turn_two_signs])
def test_evaluation_after_a_write_that_counts_no_version(write):
    """As an average of weights is swapped in for evaluation."""

    def evaluated() -> tuple[torch.Tensor, torch.Tensor]:
        layer, x = linear().requires_grad_(False).eval(), torch.ones(4, 64)
        layer(x)
        version = layer.weight._version
        write(layer.weight, torch.randn(32, 64))
        assert layer.weight._version == version
        fresh = linear().requires_grad_(False).eval()
        fresh.weight.copy_(layer.weight)
        return layer(x), fresh(x)

    torch.manual_seed(1)
    assert not torch.equal(*evaluated())
    with patches.applied(STALE):
        assert torch.equal(*evaluated())


def test_an_unchanged_weight_is_quantized_once_for_evaluation(monkeypatch):
    calls = []
    quantize = bnb.functional.int8_vectorwise_quant
    monkeypatch.setattr(bnb.functional, "int8_vectorwise_quant", lambda *a, **k: calls.append(a) or quantize(*a, **k))
    layer = linear().requires_grad_(False).eval()
    with patches.applied(STALE):
        for _ in range(3):
            layer(torch.ones(2, 64))
    assert sum(a[0].shape == (32, 64) for a in calls) == 1
