"""``torch.compile``: dynamic and unbacked shapes, inference, several models, copies, refills."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.decorators import mark_unbacked
from torch.utils.checkpoint import checkpoint

from ..catalogue import program
from ..checks import close
from ..layers import ROWS, Quantized

ONE_EACH = ("nf4-double", "int8")
WITH_OUTLIERS = ("nf4-double", "int8-threshold")
KERNELS = "compiled and eager may take different kernels"
DYNAMIC = "(?i)data.dependent|guard|unbacked|symbol|dynamic|unsupported|constraint|specializ"


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"backend": "aot_eager", **options})


def compiles(**options: Any):
    return program(**{"kinds": ONE_EACH, "compiles": True, "devices": ["cpu"], **options})


@compiles(bias=True)
def training(q: Quantized):
    """A step, forward and backward, twice."""
    step = compiled(q.layer)
    for _ in range(2):
        x = q.inputs(grad=True)
        y = step(x)
        yield q.right(y, x, rounding=KERNELS)
        y.sum().backward()
        yield q.gradient(x, rounding=KERNELS)


@compiles(kinds=WITH_OUTLIERS, bias=True, packs="too")
def inference(q: Quantized):
    """Eval, under ``no_grad`` and ``inference_mode``."""
    step = compiled(q.layer.eval())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            yield q.right(step(q.x), rounding=KERNELS)


@compiles()
def inference_of_any_batch(q: Quantized):
    """``dynamic=True``, batches of several sizes, one among them of one row."""
    step = compiled(q.layer.eval(), dynamic=True)
    with torch.no_grad():
        for rows in (4, 1, 9):
            x = q.inputs(rows)
            yield q.right(step(x), x, rounding=KERNELS)


@compiles()
def training_of_any_batch(q: Quantized):
    """``mark_dynamic`` in training."""
    step = compiled(q.layer)
    for rows in (4, 7):
        x = q.inputs(rows, grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        y = step(x)
        yield q.right(y, x, rounding=KERNELS)
        y.sum().backward()
        yield q.gradient(x, rounding=KERNELS)


@compiles(kinds=("nf4-double", "nf4-bf16", "int8"), packs="too", may_raise=DYNAMIC)
def inference_of_an_unbacked_batch(q: Quantized):
    """``mark_unbacked`` and ``fullgraph=True``, in eval."""
    step = compiled(q.layer.eval(), fullgraph=True)
    with torch.no_grad():
        q.layer(q.x)
        for rows in (4, 7):
            x = q.inputs(rows)
            mark_unbacked(x, 0)
            yield q.right(step(x), x, rounding=KERNELS)


@compiles(may_raise=DYNAMIC)
def training_of_an_unbacked_batch(q: Quantized):
    """The same in train."""
    q.layer(q.x)
    step, x = compiled(q.layer, fullgraph=True), q.inputs(4, grad=True)
    mark_unbacked(x, 0)
    y = step(x)
    yield q.right(y, x, rounding=KERNELS)
    y.sum().backward()
    yield q.gradient(x, rounding=KERNELS)


@compiles(kinds=("nf4-double",))
def several_models(q: Quantized):
    """Three models of one architecture in one process, each compiled, called in turn."""
    models = [q, q.other(1), q.other(2)]
    steps = [compiled(torch.nn.Sequential(each.layer).eval()) for each in models]
    with torch.no_grad():
        for _ in range(2):
            for each, step in zip(models, steps):
                yield each.right(step(q.x), rounding=KERNELS)


@compiles(kinds=("int8",))
def a_deep_copy(q: Quantized):
    """A compiled model is copied and both are used."""
    step = compiled(torch.nn.Sequential(q.layer))
    yield q.right(step(q.x), rounding=KERNELS)
    copied = copy.deepcopy(step)
    yield q.right(copied(q.x), rounding=KERNELS)
    copied._orig_mod[0].weight.data.zero_()
    yield q.right(step(q.x), rounding=KERNELS)


@compiles(kinds=("nf4-double",), may_raise="(?i)shape|size")
def a_refilled_weight(q: Quantized):
    """The weight is read in anew between two compiled calls."""
    step, new = compiled(q.layer), q.other()
    yield q.right(step(q.x), rounding=KERNELS)
    pairs = [(q.layer.weight.data, new.codes)]
    if q.kind.cls.__name__ == "Linear4bit":
        old, fresh = q.layer.weight.quant_state, new.layer.weight.quant_state
        pairs += [(old.absmax, fresh.absmax), (old.state2.absmax, fresh.state2.absmax), (old.offset, fresh.offset)]
    else:
        for holder in (q.layer.weight, q.layer.state):
            pairs += [(holder.SCB, new.layer.weight.SCB)] if holder.SCB is not None else []
    for old, fresh in pairs:
        old.copy_(fresh)
    yield new.right(step(q.x), rounding=KERNELS)


@compiles(kinds=WITH_OUTLIERS, bias=True)
def checkpointed(q: Quantized):
    """A checkpointed block with an adapter, cold."""
    adapter = torch.nn.Linear(q.layer.in_features, ROWS, bias=False)
    step = compiled(lambda x: checkpoint(lambda x: q.layer(x) + adapter(x), x.sin(), use_reentrant=False).cos())
    x = q.inputs(grad=True)
    step(x).sum().backward()
    y = x.detach().clone().requires_grad_(True)
    torch.nn.functional.linear(y.sin(), q.weight + adapter.weight.detach(), q.bias).cos().sum().backward()
    yield close(x.grad, y.grad, max(q.tolerance, 1e-3), rounding=KERNELS)


@compiles(packs="too")
def eager_in_between(q: Quantized):
    """Compiled training, eager evaluation, compiled training."""
    step = compiled(q.layer)
    for _ in range(2):
        x = q.inputs(grad=True)
        step(x).sum().backward()
        yield q.gradient(x, rounding=KERNELS)
        with torch.no_grad():
            yield q.right(q.layer.eval()(q.x), rounding=KERNELS)
        q.layer.train()


@compiles(kinds=("nf4-double",))
def under_autocast(q: Quantized):
    """A compiled step under bfloat16 autocast."""
    step, x = compiled(q.layer), q.inputs(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = step(x)
    yield close(y.float(), q.expected(x), 2e-2, rounding=KERNELS)
    y.float().sum().backward()
    yield close(x.grad, q.weight.sum(0).expand(4, -1), 2e-2, rounding=KERNELS)


@compiles()
def by_inductor(q: Quantized):
    """The default backend, in training."""
    step, x = torch.compile(lambda x: q.layer(x).relu()), q.inputs(grad=True)
    y = step(x)
    yield close(y, q.expected(x).relu(), q.tolerance, rounding=KERNELS)
    y.sum().backward()
    yield close(x.grad, (q.expected(x) > 0).float() @ q.weight, 0.2, rounding=KERNELS)
