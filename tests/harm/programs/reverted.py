"""Layers that live on when the plugin comes, or goes: ``patches.apply()`` in a running program, and ``revert()``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit

from ..catalogue import HANDOVER, program
from ..checks import close, same
from ..layers import NF4, Quantized
from .state_dicts import snapshot


def live(**options: Any) -> Any:
    return program(**{"kinds": ("nf4-double", "int8"), "packs": "too", "hands_over": True, **options})


def use(q: Quantized):
    """Evaluation, a training step, evaluation."""
    for train in (False, True, False):
        x = q.inputs(grad=train)
        with torch.set_grad_enabled(train):
            y = q.layer.train(train)(x)
        yield q.right(y, x)
        if train:
            y.sum().backward()
            yield q.gradient(x)


@live(kinds=("nf4", "nf4-double", "int8", "int8-threshold"), bias=True)
def used_before_and_after(q: Quantized):
    """A layer in use goes on."""
    yield from use(q)
    yield HANDOVER
    yield from use(q)


@live(bias=True)
def made_before(q: Quantized):
    """A layer that has not run yet."""
    yield HANDOVER
    yield from use(q)


@live()
def evaluated_before_and_trained_after(q: Quantized):
    """Evaluation before, training after."""
    with torch.no_grad():
        yield q.right(q.layer.eval()(q.x))
    yield HANDOVER
    x = q.inputs(grad=True)
    q.layer.train()(x).sum().backward()
    yield q.gradient(x)


@live(packs="")
def a_backward_that_is_pending(q: Quantized):
    """Forward before, backward after."""
    x = q.inputs(grad=True)
    y = q.layer(x).sum()
    yield HANDOVER
    y.backward()
    yield q.gradient(x)


@live()
def copied_and_pickled_after(q: Quantized):
    """A layer in use is copied and pickled."""
    with torch.no_grad():
        q.layer.eval()(q.x)
    yield HANDOVER
    for made in (copy.deepcopy(q.layer), copy.copy(q.layer), pickle.loads(pickle.dumps(q.layer))):
        with torch.no_grad():
            yield q.right(made(q.x))


@live(may_raise="(?i)unexpected key|not supported")
def saved_after(q: Quantized):
    """A layer in use is saved, and another one loads it."""
    with torch.no_grad():
        q.layer.eval()(q.x)
    yield HANDOVER
    saved = snapshot(q.layer)
    yield same(saved["weight"], q.codes)
    target = q.other()
    target.layer.load_state_dict(saved, strict=False)
    yield q.right(target.layer(q.x))


@live()
def moved_after(q: Quantized):
    """A layer in use is moved, and cast for a moment."""
    with torch.no_grad():
        q.layer.eval()(q.x)
    yield HANDOVER
    with torch.no_grad():
        yield q.right(q.layer.to(q.device)(q.x))
        yield q.right(q.layer.half().float()(q.x))


@live(kinds=NF4, packs="only", when="bitsandbytes>=0.49")
def dequantized_after(q: Quantized):
    """A layer in use is merged: unpatched, its weight is repacked for good."""
    with torch.no_grad():
        q.layer.eval()(q.x)
    yield HANDOVER
    with torch.no_grad():
        yield q.right(q.layer(q.x))
    yield close(dequantize_4bit(q.layer.weight.data, q.layer.weight.quant_state), q.weight, 1e-2)
