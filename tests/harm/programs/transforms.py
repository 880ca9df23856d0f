"""``torch.func``: functional calls, gradients, ``vmap``, Jacobians."""

from __future__ import annotations

import torch
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, NF4, ROWS, Quantized

UNSUPPORTED = (
    "(?i)functorch|setup_context|vmap|jvp|forward AD|forward-mode|torch.func|batching|not implemented"
    "|generate_vmap_rule"
)


@program(packs="too", bias=True)
def a_functional_call(q: Quantized):
    """``functional_call`` with the layer's own parameters."""
    y = functional_call(q.layer, dict(q.layer.named_parameters()), (q.x,))
    yield q.right(y)


@program(bias=True)
def a_functional_call_with_another_bias(q: Quantized):
    """Only the bias is replaced, and it is what gradients are for."""
    bias = torch.ones(ROWS, device=q.device, requires_grad=True)
    y = functional_call(q.layer, {"bias": bias}, (q.x,))
    (gradient,) = torch.autograd.grad(y.sum(), bias)
    q.bias = torch.ones(ROWS, device=q.device)
    yield q.right(y)
    yield close(gradient, torch.full((ROWS,), 4.0), 1e-6)


@program(kinds=BOTH, may_raise="(?i)quant|SCB|scales|attribute|assert|shape|not initialized")
def a_functional_call_with_plain_codes(q: Quantized):
    """The parameters were cloned: codes without their class."""
    y = functional_call(q.layer, {"weight": q.codes.clone()}, (q.x,))
    yield q.right(y)


@program(kinds=BOTH)
def a_functional_call_with_the_weight_of_another(q: Quantized):
    """The weight of another layer, quantized itself."""
    new = q.other()
    new.layer(q.x)
    yield new.right(functional_call(q.layer, {"weight": q.other().layer.weight}, (q.x,)))
    yield q.right(q.layer(q.x))


@program(packs="too", may_raise=UNSUPPORTED)
def a_gradient_function(q: Quantized):
    """``torch.func.grad`` with respect to the input."""
    gradient = grad(lambda x: q.layer(x).sum())(q.x)
    yield close(gradient, q.weight.sum(0).expand(4, -1), 1e-3)


@program(packs="too", may_raise=UNSUPPORTED)
def a_batched_forward(q: Quantized):
    """``vmap`` over a further dimension, in eval."""
    x = q.inputs(3, 4)
    with torch.no_grad():
        yield q.right(vmap(q.layer.eval())(x), x)


@program(may_raise=UNSUPPORTED)
def a_batched_forward_in_training(q: Quantized):
    """The same in train."""
    x = q.inputs(3, 4)
    yield q.right(vmap(q.layer)(x), x)


@program(may_raise=UNSUPPORTED)
def a_vector_jacobian_product(q: Quantized):
    """``vjp``."""
    y, pull = vjp(q.layer, q.x)
    yield q.right(y)
    yield close(pull(torch.ones_like(y))[0], q.weight.sum(0).expand(4, -1), 1e-3)


@program(may_raise=UNSUPPORTED)
def a_jacobian(q: Quantized):
    """``jacrev`` of one row is the weight."""
    yield close(jacrev(q.layer)(q.x[0:1]).reshape(ROWS, -1), q.weight, 1e-3)


@program(may_raise=UNSUPPORTED)
def a_jacobian_by_autograd(q: Quantized):
    """``torch.autograd.functional.jacobian`` of one row."""
    found = torch.autograd.functional.jacobian(q.layer, q.x[0:1])
    yield close(found.reshape(ROWS, -1), q.weight, 1e-3)


@program(may_raise=UNSUPPORTED, unrepaired=dict.fromkeys(NF4, "forward mode has no tangent behind the 4-bit kernel"))
def a_directional_derivative(q: Quantized):
    """``jvp``, forward mode."""
    y, tangent = jvp(q.layer.eval(), (q.x,), (torch.ones_like(q.x),))
    yield q.right(y)
    yield close(tangent, q.weight.sum(1).expand(4, -1), 2e-2)


@program(kinds=NF4, may_raise="(?i)state|stack|shape|size|quant|attribute|leaf|subclass")
def an_ensemble(q: Quantized):
    """The state of two models is stacked, and the first is taken out again."""
    models = [torch.nn.Sequential(q.layer), torch.nn.Sequential(q.other().layer)]
    stacked, _ = stack_module_state(models)
    yield same(stacked["0.weight"][0].detach().as_subclass(torch.Tensor), q.codes)


@program(packs="too")
def a_plain_function_of_a_module(q: Quantized):
    """The forward is taken off the class and called with the layer."""
    yield q.right(type(q.layer).forward(q.layer, q.x))
    forward = q.layer.forward
    yield q.right(forward(q.x))
