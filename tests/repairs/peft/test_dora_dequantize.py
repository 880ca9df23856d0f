"""DoRA on quantized and plain layers: one graph, the bits of eager, checkpointed or not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import patches
from patches.engine.gate import satisfied
from patches.repairs.reproducers.graphs import count_graphs

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.one_in(2)

DEQUANTIZE, CACHE = "peft-dora-dequantize", "peft-dora-cache"
LAYERS = {
    "nf4": lambda: bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32),
    "plain": lambda: torch.nn.Linear(64, 64, bias=False),
}


def model_of(kind: str, device: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    base = torch.nn.Sequential(LAYERS[kind]().to(device))
    base.is_loaded_in_4bit = kind == "nf4"
    config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False, lora_dropout=dropout)
    return peft.get_peft_model(base, config).train()


def step(call, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("kind", LAYERS)
def test_one_graph_of_the_same_step(kind, device):
    model, x = model_of(kind, device), torch.randn(2, 3, 64, device=device)
    assert count_graphs(model, x) > 1 or kind == "plain" and satisfied("torch<2.13")
    expected = step(model, model, x)
    with patches.applied(DEQUANTIZE):
        assert all(map(torch.equal, step(model, model, x), expected)), "eager changed"
        assert count_graphs(model, x) == 1
        got = step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("settled", [False, True], ids=["cold", "settled"])
def test_an_int8_weight(settled, device):
    """By itself: with DoRA the first eager call of an INT8 layer on a CPU loses its scales."""
    from peft.utils.integrations import dequantize_module_weight

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False).to(device)
    packed, scales = layer.weight.data.clone(), layer.weight.SCB.clone()
    if settled:
        layer(torch.ones(1, 64, device=device))
    with patches.applied(DEQUANTIZE):
        got = torch.compile(lambda: dequantize_module_weight(layer), fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, bnb.functional.int8_vectorwise_dequant(packed, scales))


def test_dropout_takes_the_dequantized_weight_itself(device):
    """With dropout DoRA multiplies by the weight, where it otherwise only takes its norm."""
    model, x = model_of("nf4", device, dropout=0.5), torch.randn(2, 64, device=device)
    torch.manual_seed(1)
    expected = model(x)
    with patches.applied(DEQUANTIZE):
        torch.manual_seed(1)
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, expected)


@pytest.mark.skipif(
    patches.report(CACHE)[CACHE].status is patches.Status.NOT_AFFECTED, reason="peft has no DoRA cache before 0.19"
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant, device):
    model, x = model_of("nf4", device), torch.randn(2, 64, device=device)

    def call(x):
        return checkpoint(model, x.sin(), use_reentrant=reentrant)

    expected = step(call, model, x)
    with patches.applied(DEQUANTIZE):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, fullgraph=True, backend="eager")(x)
        with patches.applied(CACHE):
            torch.compiler.reset()
            got = step(torch.compile(call, fullgraph=True, backend="aot_eager"), model, x)
    assert all(map(torch.equal, got, expected))


@pytest.mark.skipif(
    patches.report(CACHE)[CACHE].status is patches.Status.NOT_AFFECTED, reason="peft has no DoRA cache before 0.19"
)
def test_a_full_cache_is_still_emptied(device, monkeypatch):
    monkeypatch.setattr(peft.tuners.lora.dora, "ENABLE_DORA_CACHING", True)
    model, x = model_of("nf4", device), torch.randn(2, 64, device=device)
    cache = model.base_model.model[0].lora_magnitude_vector["default"]._dora_cache
    with patches.applied(CACHE):
        model.eval()(x)
        assert cache
        model.train()(x)
        assert not cache
