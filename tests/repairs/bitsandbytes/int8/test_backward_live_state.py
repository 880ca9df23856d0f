"""INT8 backward uses what forward used: saved-tensor hooks see it, and a refilled weight is noticed."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import patches

ID = "bitsandbytes-int8-backward-live-state"


def linear(device: str = "cpu", bias: bool = True, **options) -> bnb.nn.Linear8bitLt:
    torch.manual_seed(0)
    return bnb.nn.Linear8bitLt(64, 96, bias=bias, has_fp16_weights=False, **options).to(device)


def gradients(layer, x: torch.Tensor, how: bool | None = None) -> list[torch.Tensor]:
    """Output and gradients of one step; ``how`` is ``use_reentrant`` of checkpointing, None without."""
    layer.zero_grad()
    x = x.clone().requires_grad_(True)
    y = layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_sound_gradients_stay_bit_identical(device, dtype, training, threshold):
    layer = linear(device, threshold=threshold).train(training).requires_grad_(False)
    layer.bias.data = layer.bias.data.to(dtype)
    layer.bias.requires_grad_(True)
    x = torch.randn(2, 5, 64, device=device).to(dtype)[0]  # 2-D: the bias gradient of 3-D has the wrong shape
    x[:, 3] *= 20
    before = [gradients(layer, x, how) for how in (None, True, False)]
    with patches.applied(ID):
        after = [gradients(layer, x, how) for how in (None, True, False)]
    assert len(before[0]) == 3
    for old, new in zip(before, after):
        assert all(torch.equal(a, b) for a, b in zip(old, new)), "a gradient changed"


def test_an_input_that_another_operation_saved_may_have_outliers(device):
    layer = linear(device, threshold=0.5).eval().requires_grad_(False)
    layer.bias.data = layer.bias.data.half()
    x = torch.randn(4, 64, device=device, dtype=torch.float16, requires_grad=True)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            layer(torch.tanh(x)).sum().backward()
    with patches.applied(ID):
        layer(torch.tanh(x)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_a_bias_that_is_trained_alone_gets_its_gradient(training):
    layer = linear().train(training)
    layer.weight.requires_grad_(False)
    with patches.applied(ID):
        layer(torch.ones(3, 64)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((96,), 3.0))


def packed(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """What saved-tensor hooks get to see of one forward."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        layer(x.clone().requires_grad_(True))
    return seen


@pytest.mark.parametrize("training", [True, False])
def test_hooks_see_codes_and_scales_and_not_the_input_of_a_frozen_weight(training):
    layer = linear(bias=False).train(training).requires_grad_(False)
    x = torch.randn(4, 64)
    assert not any(t.dtype == torch.int8 for t in packed(layer, x)), "the defect is gone without the patch"
    with patches.applied(ID):
        seen = packed(layer, x)
    assert [t.dtype for t in seen] == [torch.int8, layer.state.SCB.dtype]
    assert type(seen[0]) is torch.Tensor, "a hook that calls .cpu() must not meet Int8Params.cpu()"
    assert seen[0].data_ptr() == layer.weight.data_ptr(), "the weight was copied"


@pytest.mark.parametrize("training", [True, False])
def test_save_on_cpu_gives_the_same_gradients(training):
    layer = linear().train(training).requires_grad_(False)
    x = torch.randn(4, 64)
    reference = gradients(layer, x)
    with patches.applied(ID), torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, gradients(layer, x), reference))


def inputs_kept(make, training: bool, how: bool | None) -> int:
    """How many of the inputs of six layers in a row are alive between forward and backward."""
    layers = [make().train(training).requires_grad_(False) for _ in range(6)]
    inputs: list[StorageWeakRef] = []

    def block(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        x = torch.sin(x)
        inputs.append(StorageWeakRef(x.untyped_storage()))
        return torch.sin(layer(x))

    x = torch.randn(4, 64, requires_grad=True)
    for layer in layers:
        x = block(x, layer) if how is None else checkpoint(block, x, layer, use_reentrant=how)
    return sum(not ref.expired() for ref in inputs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", [None, True, False])
def test_as_many_inputs_are_kept_as_by_nn_linear(training, how):
    def make() -> bnb.nn.Linear8bitLt:
        return bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")

    with patches.applied(ID):
        kept = inputs_kept(make, training, how)
    assert kept == inputs_kept(lambda: torch.nn.Linear(64, 64), training, how) == 0
    if how is not True:  # reentrant checkpointing ran without grad, so even the unpatched keeps nothing
        assert inputs_kept(make, training, how) == 6


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("refill", ["weight", "codes"])
def test_refilling_a_weight_before_backward_raises_torchs_own_error(training, refill):
    layer = linear(bias=False).train(training).requires_grad_(False)
    x = torch.randn(4, 64, requires_grad=True)

    def step() -> None:
        y = layer(x)
        with torch.no_grad():
            (layer.weight if refill == "weight" else layer.state.SCB).fill_(1)
        y.sum().backward()

    step()  # silently wrong
    with patches.applied(ID), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()


def test_two_forwards_before_one_backward_each_keep_their_weight():
    first, second = linear(bias=False), linear(bias=False).requires_grad_(False)
    torch.manual_seed(1)
    other = bnb.nn.Int8Params(torch.randn(96, 64), requires_grad=False).to("cpu")
    x = torch.randn(4, 64)
    expected = gradients(first.requires_grad_(False), x)[1]

    def streamed() -> torch.Tensor:
        layer = linear(bias=False).requires_grad_(False)
        a = x.clone().requires_grad_(True)
        y = layer(a)
        layer.weight = other
        with torch.no_grad():
            layer(x)
        y.square().sum().backward()
        return a.grad

    assert not torch.equal(streamed(), expected)
    other = bnb.nn.Int8Params(torch.randn(96, 64), requires_grad=False).to("cpu")
    with patches.applied(ID):
        assert torch.equal(streamed(), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", [None, True, False])
def test_compiled_equals_eager_in_one_graph(training, how):
    layer = linear(bias=False).train(training).requires_grad_(False)
    x = torch.randn(4, 64)
    with patches.applied(ID):
        eager = gradients(layer, x, how)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: run(layer, x, how), fullgraph=True, backend="aot_eager")
        a = x.clone().requires_grad_(True)
        y = compiled(a)
        y.square().sum().backward()
    assert torch.equal(y, eager[0]) and torch.equal(a.grad, eager[1])


def run(layer, x: torch.Tensor, how: bool | None) -> torch.Tensor:
    return layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
