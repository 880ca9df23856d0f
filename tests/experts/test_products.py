"""Experts in 4 bits in one graph, where transformers' own experts are one: ``grouped_mm`` and ``batched_mm``."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

import patches  # noqa: E402
from patches.experts import products  # noqa: E402
from tests import forks  # noqa: E402
from tests.experts.models import loaded, saved  # noqa: E402
from tests.releases import ROOT, SHORT  # noqa: E402

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


LORA = [
    pytest.param(
        implementation, True, id=f"LoRA-{implementation}",
        marks=pytest.mark.release("base, and weak references in tests/experts/test_lora_factors.py"),
    )
    for implementation in ("eager", "grouped_mm", "batched_mm")
]  # fmt: skip


@pytest.mark.parametrize(("implementation", "adapted"), [pytest.param("eager", False, id="base"), *LORA])
def test_what_breaks_the_graph_computes_the_same(qwen3, implementation, adapted):
    """As in floating point: a loop over experts does, and peft's wrapper. What tensors do between two graphs is not compiled."""
    torch._dynamo.reset()
    model = patches.quantize_experts(loaded(qwen3, implementation)).requires_grad_(False)
    with patches.applied("torch-quantized-experts"):
        if adapted:
            peft = pytest.importorskip("peft", minversion="0.17", reason="target_parameters are new in 0.17")
            names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            peft.inject_adapter_in_model(peft.LoraConfig(target_parameters=names, init_lora_weights=False), model)
        mlp, x = model.model.layers[0].mlp, torch.randn(1, 8, 64)
        expected = step(mlp, x)
        for one, other in zip(expected, step(torch.compile(mlp, backend="eager"), x)):
            assert torch.equal(one, other)


def test_an_operator_holds_all_that_it_needs(qwen3):
    """Its layout is a string: a graph that outlives the process finds it there."""
    packed = patches.quantize_experts(loaded(qwen3)).model.layers[0].mlp.experts.gate_up_proj.packed
    text = products.encode_layout(packed.layout(), list(packed.tensors()))
    assert products.decode_layout(text) == (packed.layout(), tuple(packed.tensors()))


PROGRAM = """
import sys
from pathlib import Path

import torch

import patches
from tests.experts.models import loaded

model = patches.quantize_experts(loaded(Path(sys.argv[1]), "grouped_mm")).requires_grad_(False)
mlp, x = model.model.layers[0].mlp, torch.ones(1, 8, 64)
assert torch.allclose(torch.compile(mlp, fullgraph=True)(x), mlp(x), atol=1e-5)
"""


def test_experts_say_which_operator_their_graph_calls(qwen3):
    """torch finds a graph on disk again by what its inputs say of themselves."""
    experts = patches.quantize_experts(loaded(qwen3)).model.layers[0].mlp.experts.gate_up_proj
    assert (
        products.OPERATOR.name() == f"bnb_patches::{products.NAME}" and products.NAME in experts.__tensor_flatten__()[1]
    )


@pytest.mark.release("what the experts say of themselves, which the graph is found by")
def test_a_graph_that_another_release_left_on_disk_is_not_used(qwen3, tmp_path):
    """It calls an operator that this process does not have: so it was after an upgrade of either package."""
    own = version("bitsandbytes")
    other = next(ROOT / ".bnb" / release for release in SHORT if release != own)
    if not other.is_dir():
        pytest.skip(f"bitsandbytes {other.name} is not in .bnb: make .bnb/{other.name}")
    before = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PATCHES_AUTOLOAD": "0"}
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    for first in ([str(other)], []):
        env = {**before, "PYTHONPATH": os.pathsep.join([*first, *paths, str(ROOT)])}
        (done,) = forks.run(forks.Program(["-c", PROGRAM, str(qwen3)], env), timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
