"""Training: gradients of inputs and biases, modes, hooks, and what autograd keeps."""

from __future__ import annotations

import contextlib

import torch

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, INT8, NF4, ROWS, Quantized, random

FROZEN_GRAPH = "(?i)second time|freed"


@program(kinds=(*BOTH, "int8-threshold", "nf4-float-storage"), packs="too")
def of_the_input(q: Quantized):
    """A plain backward through the layer."""
    x = q.inputs(grad=True)
    y = q.layer(x)
    yield q.right(y, x)
    y.sum().backward()
    yield q.gradient(x)


@program(packs="too")
def of_the_input_in_eval(q: Quantized):
    """The same in eval, as for saliency maps."""
    x = q.inputs(grad=True)
    upstream = random(4, ROWS, seed=3, device=q.device)
    (q.layer.eval()(x) * upstream).sum().backward()
    yield q.gradient(x, upstream)


@program(bias=True, packs="too")
def of_a_bias_that_trains(q: Quantized):
    """BitFit: only the bias is trained."""
    q.layer.bias.requires_grad_(True)
    upstream = random(4, ROWS, seed=3, device=q.device)
    (q.layer(q.x) * upstream).sum().backward()
    yield close(q.layer.bias.grad, upstream.sum(0), 1e-5)


@program(bias=True)
def of_three_dimensions(q: Quantized):
    """``(batch, sequence, features)``, as in a transformer."""
    x = q.inputs(2, 3, grad=True)
    y = q.layer(x)
    yield q.right(y, x)
    y.sum().backward()
    yield q.gradient(x)


@program()
def accumulated_over_batches(q: Quantized):
    """Two backward passes into one gradient."""
    x = q.inputs(grad=True)
    for factor in (1.0, 2.0):
        (q.layer(x) * factor).sum().backward()
    yield q.gradient(x, 3.0)


@program()
def of_two_branches(q: Quantized):
    """The layer is used twice in one graph, on different inputs."""
    x = q.inputs(grad=True)
    (q.layer(x).sum() + 2 * q.layer(x * 2).sum()).backward()
    yield q.gradient(x, 5.0)


@program(may_raise=FROZEN_GRAPH)
def twice_with_retain_graph(q: Quantized):
    """``backward(retain_graph=True)`` and again."""
    x = q.inputs(grad=True)
    y = q.layer(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    yield q.gradient(x, 2.0)


@program(may_raise=FROZEN_GRAPH)
def two_losses_of_one_output(q: Quantized):
    """Two losses of the same output, each with a backward of its own and no ``retain_graph``."""
    x = q.inputs(grad=True)
    y = q.layer(x)
    y.sum().backward()
    (2 * y).sum().backward()
    yield q.gradient(x, 3.0)


@program(kinds=("int8", "int8-threshold"), may_raise=FROZEN_GRAPH)
def two_losses_of_one_output_in_eval(q: Quantized):
    """The same in eval, where INT8 takes another function."""
    x = q.inputs(grad=True)
    y = q.layer.eval()(x)
    y.sum().backward()
    (2 * y).sum().backward()
    yield q.gradient(x, 3.0)


@program(packs="too")
def none_wanted(q: Quantized):
    """``no_grad`` and ``inference_mode``, in train and in eval."""
    for mode in (torch.no_grad, torch.inference_mode):
        for train in (True, False):
            with mode():
                y = q.layer.train(train)(q.x)
            yield q.right(y)
            yield same(y.requires_grad, False)


@program(kinds=BOTH, packs="too")
def of_a_layer_made_in_inference_mode(q: Quantized):
    """The model is loaded under ``inference_mode`` and an adapter is trained through it."""
    with torch.inference_mode():
        layer = q.other(seed=0).layer
    x = q.inputs(grad=True)
    layer(x).sum().backward()
    yield q.gradient(x)


@program(kinds=BOTH, packs="too")
def of_a_layer_made_in_inference_mode_in_eval(q: Quantized):
    """The same in eval."""
    with torch.inference_mode():
        layer = q.other(seed=0).layer.eval()
    x = q.inputs(grad=True)
    layer(x).sum().backward()
    yield q.gradient(x)


@program(kinds=BOTH, packs="too")
def after_a_first_run_in_inference_mode(q: Quantized):
    """The first evaluation is under ``inference_mode``, then comes training."""
    with torch.inference_mode():
        yield q.right(q.layer.eval()(q.x))
    x = q.inputs(grad=True)
    q.layer.train()(x).sum().backward()
    yield q.gradient(x)


@program(kinds=("nf4", "nf4-double", "nf4-bf16", "int8"), packs="too")
def under_autocast(q: Quantized):
    """bfloat16 autocast, forward and backward."""
    x = q.inputs(grad=True)
    with torch.autocast(q.device.type, torch.bfloat16):
        y = q.layer(x)
    yield close(y.float(), q.expected(x), 2e-2)
    y.float().sum().backward()
    yield close(x.grad, q.weight.sum(0).expand(4, -1), 2e-2)


@program(kinds=("nf4", "int8"))
def of_inputs_in_half_precision(q: Quantized):
    """float16 and bfloat16 inputs."""
    for dtype in (torch.float16, torch.bfloat16):
        x = q.inputs().to(dtype).requires_grad_(True)
        q.layer(x).sum().backward()
        yield same(x.grad.dtype, dtype)
        yield close(x.grad.float(), q.weight.sum(0).expand(4, -1), 2e-2)


@program(may_raise="(?i)double backward|not differentiable|once_differentiable|does not require grad|grad_fn")
def of_a_gradient(q: Quantized):
    """A penalty on the gradient: double backward."""
    x = q.inputs(grad=True)
    (gradient,) = torch.autograd.grad((q.layer(x) ** 3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    y = q.expected(x).double()
    inner = 3 * y**2 @ q.weight.double()
    yield close(x.grad, 2 * (inner @ q.weight.double().T * 6 * y) @ q.weight.double(), 1e-2)


@program()
def by_anomaly_mode(q: Quantized):
    """``detect_anomaly`` on."""
    x = q.inputs(grad=True)
    with torch.autograd.detect_anomaly():
        q.layer(x).sum().backward()
    yield q.gradient(x)


@program(kinds=BOTH, bias=True)
def an_adapter_trained(q: Quantized):
    """LoRA by hand, five steps, beside the same on a plain layer that holds the dequantized weight."""
    plain = torch.nn.Linear(*q.weight.T.shape, device=q.device).requires_grad_(False)
    plain.weight.data, plain.bias.data = q.weight.clone(), q.bias.clone()
    outputs = []
    for base in (q.layer, plain):
        torch.manual_seed(1)
        down, up = torch.nn.Linear(base.in_features, 4, bias=False), torch.nn.Linear(4, ROWS, bias=False)
        adapter = torch.nn.Sequential(down, up).to(q.device)
        optimizer = torch.optim.SGD(adapter.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            (base(q.x) + adapter(q.x)).square().mean().backward()
            optimizer.step()
        outputs.append(adapter(q.x))
    yield close(outputs[0], outputs[1].detach(), 1e-2)


@program(kinds=BOTH)
def two_layers_deep(q: Quantized):
    """The gradient passes a quantized layer, an activation and another quantized layer."""
    second = q.other(columns=ROWS)
    x = q.inputs(grad=True)
    torch.nn.Sequential(q.layer, torch.nn.Tanh(), second.layer)(x).sum().backward()
    hidden = q.expected(x).tanh()
    upstream = second.weight.sum(0) * (1 - hidden**2)
    yield close(x.grad, upstream @ q.weight, max(q.tolerance, 1e-3))


@program(may_raise="(?i)in-?place|view")
def written_in_place_after(q: Quantized):
    """``ReLU(inplace=True)`` right after the layer."""
    x = q.inputs(grad=True)
    y = torch.nn.functional.relu(q.layer(x), inplace=True)
    y.sum().backward()
    yield close(x.grad, (q.expected(x) > 0).float() @ q.weight, max(q.tolerance, 0.1))


@program(kinds=BOTH)
def of_inputs_that_are_views(q: Quantized):
    """Inputs that are transposed, expanded and every other row."""
    whole = q.inputs(2, 8).requires_grad_(True)
    for view in (whole.transpose(0, 1), whole[0, ::2], whole[:1].expand(3, -1, -1)):
        yield q.right(q.layer(view), view)
    q.layer(whole[0, ::2]).sum().backward()
    expected = torch.zeros_like(whole)
    expected[0, ::2] = q.weight.sum(0)
    yield close(whole.grad, expected, 1e-3)


@program(kinds=BOTH)
def of_a_part_of_the_output(q: Quantized):
    """The loss takes one output feature."""
    x = q.inputs(grad=True)
    q.layer(x)[:, 5].sum().backward()
    yield close(x.grad, q.weight[5].expand(4, -1), 1e-3)


@program(kinds=("int8", "int8-threshold"))
def of_inputs_with_outliers(q: Quantized):
    """Some input features are far larger than the others."""
    x = q.inputs()
    x[:, 3] *= 30
    x.requires_grad_(True)
    for train in (True, False):
        y = q.layer.train(train)(x)
        yield close(y, q.expected(x), 6e-2)
        x.grad = None
        y.sum().backward()
        yield q.gradient(x)
        yield same(float(x.detach()[:, 3].abs().max()) > 6, True)


@program(kinds=INT8)
def of_a_float16_input_with_outliers(q: Quantized):
    """The same in float16, whose outliers the kernel sets to zero and puts back."""
    layer = q.other(seed=0, threshold=6.0).layer.eval()
    x = q.inputs()
    x[:, 3] *= 30
    half = x.half()
    kept = half.clone()
    yield close(layer(half).float(), q.expected(x), 2e-2)
    yield same(half, kept)


@program(kinds=NF4)
def with_the_weight_dequantized_by_the_user(q: Quantized):
    """The user dequantizes by himself and multiplies: gradients come from torch alone."""
    from bitsandbytes.functional import dequantize_4bit

    x = q.inputs(grad=True)
    weight = dequantize_4bit(q.layer.weight.data, q.layer.weight.quant_state)
    torch.nn.functional.linear(x, weight).sum().backward()
    yield q.gradient(x)


@program(kinds=BOTH, bias=True)
def set_grad_enabled_in_between(q: Quantized):
    """Gradients are switched off for the quantized layer and on again around it."""
    x = q.inputs(grad=True)
    with torch.set_grad_enabled(False):
        frozen = q.layer(x)
    with contextlib.nullcontext():
        y = (frozen + x[:, :ROWS]).sum()
    y.backward()
    yield same(frozen.requires_grad, False)
    yield close(x.grad.sum(), torch.tensor(4.0 * ROWS), 1e-6)
