"""Hooks of modules and of autograd, and gradient checkpointing of both kinds."""

from __future__ import annotations

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from ..catalogue import program
from ..checks import close, same
from ..counting import calls_of, products
from ..layers import BOTH, COLUMNS, ROWS, Quantized


def block(q: Quantized) -> torch.nn.Module:
    """An adapter that trains, beside a quantized layer, as in LoRA."""
    adapter = torch.nn.Linear(COLUMNS, ROWS, bias=False, device=q.device)
    adapter.weight.data.fill_(0.01)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = q.layer, adapter

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.adapter(x) + self.base(x)

    return Block()


@program(bias=True)
def before_and_after_forward(q: Quantized):
    """A hook doubles the input, another negates the output."""
    q.layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    q.layer.register_forward_hook(lambda module, args, y: -y)
    yield close(q.layer(q.x), -q.expected(2 * q.x), q.tolerance)


@program()
def on_backward(q: Quantized):
    """A full backward hook sees the gradients that pass."""
    seen = []
    q.layer.register_full_backward_hook(lambda module, into, out: seen.append((into[0].clone(), out[0].clone())))
    x = q.inputs(grad=True)
    q.layer(x).sum().backward()
    yield same(len(seen), 1)
    yield close(seen[0][0], q.weight.sum(0).expand(4, -1), 1e-3)
    yield close(seen[0][1], torch.ones(4, ROWS, device=q.device), 0)


@program()
def on_tensors(q: Quantized):
    """A hook on the output halves its gradient, and one on the input keeps it."""
    x, kept = q.inputs(grad=True), []
    x.register_hook(kept.append)
    y = q.layer(x)
    y.register_hook(lambda gradient: gradient / 2)
    y.sum().backward()
    yield q.gradient(x, 0.5)
    yield close(kept[0], x.grad, 0)


@program(kinds=("nf4", "nf4-double", "int8"))
def what_saved_tensor_hooks_hold(q: Quantized):
    """A hook counts the bytes that a step keeps: a frozen weight is there anyway, and is not among them."""
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.untyped_storage().data_ptr())
        return tensor

    x = q.inputs(grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = q.layer(x)
    y.sum().backward()
    yield same(q.layer.weight.untyped_storage().data_ptr() in held, False)
    yield q.gradient(x)


@program(kinds=BOTH)
def activations_kept_on_the_cpu(q: Quantized):
    """``save_on_cpu`` around a step."""
    x, model = q.inputs(grad=True), block(q)
    with save_on_cpu():
        y = model(x)
    y.sum().backward()
    yield close(x.grad, (q.weight + 0.01).sum(0).expand(4, -1), 1e-3)


@program(kinds=BOTH)
def activations_compressed(q: Quantized):
    """Saved-tensor hooks that keep everything in half precision: what autograd keeps is only that of the adapter."""
    x, model = q.inputs(grad=True), block(q)
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        y = model(x)
    y.sum().backward()
    yield close(x.grad, (q.weight + 0.01).sum(0).expand(4, -1), 1e-2)


@program(kinds=BOTH, packs="too")
def checkpointed(q: Quantized):
    """A block with an adapter under both kinds of checkpointing, several steps."""
    for reentrant in (False, True):
        model = block(q)
        for _ in range(2):
            x = q.inputs(grad=True)
            model.adapter.zero_grad()
            y = checkpoint(model, x, use_reentrant=reentrant)
            yield close(y, q.expected(x) + 0.01 * x.sum(1, keepdim=True), q.tolerance, q.rounding)
            y.sum().backward()
            yield close(x.grad, (q.weight + 0.01).sum(0).expand(4, -1), 1e-2, q.rounding)
            yield close(model.adapter.weight.grad, x.detach().sum(0).expand(ROWS, -1), 1e-5)


@program(kinds=BOTH)
def checkpointed_in_pieces(q: Quantized):
    """``checkpoint_sequential`` over a stack of layers."""
    second = q.other(columns=ROWS)
    model = torch.nn.Sequential(q.layer, torch.nn.Tanh(), second.layer, torch.nn.Tanh())
    x = q.inputs(grad=True)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    y = x.detach().clone().requires_grad_(True)
    second_out = (y @ q.weight.T).tanh() @ second.weight.T
    second_out.tanh().sum().backward()
    yield close(x.grad, y.grad, max(q.tolerance, 1e-3))


@program(kinds=BOTH)
def checkpointed_inside_a_checkpoint(q: Quantized):
    """One checkpoint inside another, without early stop."""
    model, x = block(q), q.inputs(grad=True)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x.sin(), use_reentrant=False).cos()

    with set_checkpoint_early_stop(False):
        checkpoint(outer, x, use_reentrant=False).sum().backward()
    y = x.detach().clone().requires_grad_(True)
    (y.sin() @ (q.weight + 0.01).T).cos().sum().backward()
    yield close(x.grad, y.grad, max(q.tolerance, 1e-2))


@program(kinds=BOTH)
def products_of_a_checkpointed_step(q: Quantized):
    """The last layer of a checkpointed block is frozen: nothing of it has to be computed twice."""
    first = torch.nn.Linear(COLUMNS, COLUMNS, device=q.device)
    x = q.inputs(grad=True)
    with products() as count:
        y = checkpoint(lambda x: q.layer(first(x).tanh()), x, use_reentrant=False)
        y.sum().backward()
    yield same(count["forward"], 1)
    yield same(first.weight.grad is not None, True)


@program(kinds=("nf4", "int8"))
def a_parametrized_bias(q: Quantized):
    """``parametrize`` on the bias of a quantized layer."""

    class Half(torch.nn.Module):
        def forward(self, bias: torch.Tensor) -> torch.Tensor:
            return bias / 2

    q.layer.bias = torch.nn.Parameter(torch.ones(ROWS, device=q.device), requires_grad=False)
    parametrize.register_parametrization(q.layer, "bias", Half())
    q.bias = torch.full((ROWS,), 0.5, device=q.device)
    yield q.right(q.layer(q.x))
    parametrize.remove_parametrizations(q.layer, "bias")
    yield q.right(q.layer(q.x))


@program(kinds=BOTH)
def a_hook_that_counts_calls(q: Quantized):
    """A profiler's hook: each forward of the layer is one call of its class."""
    with calls_of(type(q.layer).forward) as count:
        for _ in range(3):
            q.layer(q.x)
    yield same(count[0], 3)
