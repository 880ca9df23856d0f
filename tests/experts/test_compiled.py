"""Experts in 4 bits in one graph, where transformers' own experts are one: ``grouped_mm`` and ``batched_mm``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

import patches  # noqa: E402
from patches.repairs.helpers.experts import compiled  # noqa: E402
from tests.experts.models import loaded, saved  # noqa: E402

INDUCTOR = pytest.param("inductor", marks=pytest.mark.release("aot_eager, which traces the same graph"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("qwen3"), "qwen3_moe")


def step(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_one_graph_forward_and_backward(qwen3, implementation, dtype, backend):
    torch._dynamo.reset()
    model = patches.quantize_experts(loaded(qwen3, implementation, dtype, bnb_4bit_use_double_quant=True))
    mlp = model.requires_grad_(False).model.layers[0].mlp
    x = torch.randn(1, 8, 64, dtype=dtype)
    expected = step(mlp, x)
    got = step(torch.compile(mlp, fullgraph=True, backend=backend), x)
    for one, other in zip(expected, got):
        assert (one - other).float().norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * one.float().norm()


def test_an_operator_holds_all_that_it_needs(qwen3):
    """Its layout is a string: a graph that outlives the process finds it there."""
    packed = patches.quantize_experts(loaded(qwen3)).model.layers[0].mlp.experts.gate_up_proj.packed
    text = compiled.written(packed.layout(), list(packed.tensors()))
    assert compiled.read(text) == (packed.layout(), tuple(packed.tensors()))
