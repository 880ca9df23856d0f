"""INT8 backward uses what forward used, and notices a refilled weight."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import patches
from tests.repairs.bitsandbytes.int8.layers import gradients, linear, product

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-int8-backward-live-state"


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
@pytest.mark.parametrize("kind", ["resident", "no parameter", "float weight", "compiled"])
def test_a_bias_that_is_trained_alone_gets_its_gradient(kind, training):
    bias = torch.zeros(96, requires_grad=True)
    if kind == "no parameter":
        weight = linear().weight
        call = product(weight.data.clone(), weight.SCB, training, bias)
    elif kind == "float weight":
        call = bnb.nn.Linear8bitLt(64, 96, has_fp16_weights=True).train(training)
        call.weight.requires_grad_(False)
        bias = call.bias
    else:
        call = linear().train(training)
        call.weight.requires_grad_(False)
        bias = call.bias
        call(torch.ones(3, 64))
    with patches.applied(ID):
        if kind == "compiled":
            torch._dynamo.reset()
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        call(torch.ones(3, 64)).sum().backward()
    assert torch.equal(bias.grad, torch.full((96,), 3.0))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", [None, True, False])
@pytest.mark.parametrize("made", ["layer", "first forward"])
def test_layers_made_in_inference_mode_still_train(made, how, training):
    """torch refuses to save such tensors; without the patch it just works."""

    def layer_of() -> bnb.nn.Linear8bitLt:
        torch.manual_seed(0)
        with torch.inference_mode(made == "layer"):
            layer = bnb.nn.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False).requires_grad_(False)
            if made == "layer":
                layer.to("cpu")
        with torch.inference_mode():
            layer(torch.ones(1, 64))  # the first forward quantizes the weight of a layer that was never moved
        return layer.train(training)

    x = torch.randn(4, 64)
    expected = gradients(layer_of(), x, how)
    with patches.applied(ID):
        assert all(map(torch.equal, gradients(layer_of(), x, how), expected))


@pytest.mark.parametrize("training", [True, False])
def test_codes_made_in_inference_mode_that_are_no_parameter(training):
    with torch.inference_mode():
        weight = linear(bias=False).weight
        call = product(weight.data.clone(), weight.SCB.clone(), training)
    leaf = torch.randn(4, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(call(leaf).square().sum(), leaf)
    with patches.applied(ID):
        assert torch.equal(torch.autograd.grad(call(leaf).square().sum(), leaf)[0], expected)


@pytest.mark.parametrize("how", [None, True, False])
def test_a_layer_that_was_never_moved_is_quantized_in_its_first_forward(how):
    """Its recomputation sees an int8 weight where the forward saw a float one: as much must be saved."""

    def cold() -> bnb.nn.Linear8bitLt:
        torch.manual_seed(0)
        return bnb.nn.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False).requires_grad_(False)

    x = torch.randn(4, 64)
    expected = gradients(cold(), x, how)
    with patches.applied(ID):
        assert all(map(torch.equal, gradients(cold(), x, how), expected))


@pytest.mark.parametrize("training", [True, False])
def test_a_second_backward_goes_on_working(training):
    """Without the patch it does, for nothing is freed; a layer that learns nothing has nothing to save."""
    layer, x = linear(bias=False).train(training).requires_grad_(False), torch.randn(4, 64, requires_grad=True)
    with patches.applied(ID):
        y = layer(x)
        y.sum().backward()
        y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_a_backward_after_apply_or_revert(training, threshold):
    layer = linear(bias=False, threshold=threshold).train(training).requires_grad_(False)
    x = torch.randn(4, 64)
    expected = gradients(layer, x)[1]

    def backward(y: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y.square().sum(), leaf)[0]

    leaf = x.clone().requires_grad_(True)
    before = layer(leaf)
    with patches.applied(ID):
        assert torch.equal(backward(before), expected)
        since = layer(leaf)
        saved = product(layer.state.CB.clone(), layer.state.SCB, training)(leaf)
    assert torch.equal(backward(since), expected)
    with pytest.raises(RuntimeError, match=f"{ID}.*run forward again"):
        backward(saved)


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
    with (
        patches.applied(ID),
        pytest.raises(RuntimeError, match=r"modified by an inplace operation.*; expected version"),
    ):
        step()


def test_two_forwards_before_one_backward_each_keep_their_weight():
    first = linear(bias=False)
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


@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_layer_that_is_offloaded_is_one_graph(training):
    """Its hook brings a new weight for each forward: what Dynamo traces must not depend on which."""
    hooks = pytest.importorskip("accelerate.hooks")
    layer, x = linear(bias=False).train(training).requires_grad_(False), torch.randn(4, 64)
    with patches.applied():
        expected = gradients(linear(bias=False).train(training).requires_grad_(False), x)
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(torch.device("cpu"), offload=True))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(layer, backend="aot_eager")
        assert all(torch.equal(got, right) for _ in range(3) for got, right in zip(gradients(compiled, x), expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def run(layer, x: torch.Tensor, how: bool | None) -> torch.Tensor:
    return layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
