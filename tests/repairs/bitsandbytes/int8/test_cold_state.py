"""A freshly quantized INT8 layer, compiled before it ever ran: nothing is written, the bits are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import patches

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-int8-cold-state"
CHECKPOINTS = {"none": None, "reentrant": True, "non-reentrant": False}


def layer_of(device: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return bnb.nn.Linear8bitLt(64, 32, bias=bias, has_fp16_weights=False).to(dtype).to(device)


def call_of(layer: torch.nn.Module, kind: bool | None):
    def call(x):
        return layer(x.sin()) if kind is None else checkpoint(layer, x.sin(), use_reentrant=kind)

    return call


def step(call, layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_first_step_is_one_graph_and_so_is_the_second(kind, dtype, device):
    x = torch.randn(2, 3, 64, dtype=dtype, device=device)
    eager = layer_of(device, dtype)
    expected = step(call_of(eager, CHECKPOINTS[kind]), eager, x)
    with patches.applied(ID):
        layer = layer_of(device, dtype)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(call_of(layer, CHECKPOINTS[kind]), fullgraph=True, backend=counter)
        for _ in range(2):
            got = step(compiled, layer, x)
            assert len(got) == len(expected) and all(map(torch.equal, got, expected))
        assert counter.frame_count == 1


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_written(training, device):
    layer = layer_of(device).train(training)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state, weight = dict(vars(layer.state)), dict(vars(layer.weight))
    with patches.applied(ID), torch.no_grad():
        torch.compile(layer, fullgraph=True, backend="eager")(torch.randn(2, 64, device=device))
    assert vars(layer.state) == state
    assert all(vars(layer.weight)[k] is v for k, v in weight.items())
    after = layer.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)


def test_eager_settles_the_state_as_before(device):
    x = torch.randn(2, 64, device=device)
    expected = layer_of(device)(x)
    with patches.applied(ID):
        layer = layer_of(device)
        assert torch.equal(layer(x), expected)
        assert layer.state.CB is not None and layer.weight.CB is None


def test_from_cold_to_settled_and_from_train_to_eval_in_between(device):
    """An eager call between compiled ones, and a change of mode, compile once more and stay right."""
    x = torch.randn(2, 64, device=device)
    expected = layer_of(device)(x).detach()
    expected_eval = layer_of(device).eval()(x).detach()
    with patches.applied(ID):
        layer = layer_of(device)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        layer(x)
        assert torch.equal(compiled(x), expected)
        layer.eval()
        assert torch.equal(compiled(x), expected_eval)


def test_a_weight_without_scales_takes_the_old_path(device):
    from patches.repairs.bitsandbytes.int8.cold_state import traced

    layer = layer_of(device)
    x = torch.randn(2, 64, device=device)
    for change in (lambda it: setattr(it.weight, "SCB", None), lambda it: setattr(it.state, "has_fp16_weights", True)):
        changed = copy.deepcopy(layer)
        changed.weight.CB, changed.weight.SCB = layer.weight.CB, layer.weight.SCB
        probe = torch.compile(lambda x, it=changed: traced(it, x) is None, fullgraph=True, backend="eager")
        assert probe(x) is False
        change(changed)
        torch.compiler.reset()
        assert probe(x) is True


def test_an_eager_forward_in_between_compiles_nothing_again(device):
    """As the Trainer does: it compiles the model for its steps, and evaluates the model itself."""
    with patches.applied():
        torch.manual_seed(0)
        layers = [bnb.nn.Linear8bitLt(16, 16, has_fp16_weights=False, threshold=6.0) for _ in range(2)]
        model = torch.nn.Sequential(*layers).to(device)
        x = torch.randn(3, 16, device=device)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        cold, eager, warm = compiled(x), model(x), compiled(x)
    assert counter.frame_count == 1
    assert torch.equal(cold, eager) and torch.equal(warm, eager)
