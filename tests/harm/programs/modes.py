"""Eval and train in turn, and what is done with a weight after an evaluation."""

from __future__ import annotations

import copy

import torch
from bitsandbytes import functional
from bitsandbytes.functional import dequantize_4bit

from ..catalogue import program
from ..checks import close, same
from ..counting import calls_of
from ..layers import BOTH, NF4, ROWS, Quantized
from .state_dicts import snapshot


def evaluate(q: Quantized) -> torch.Tensor:
    with torch.no_grad():
        return q.layer.eval()(q.x)


@program(kinds=(*BOTH, "nf4-bf16", "int8-threshold"), packs="too", bias=True)
def train_and_eval_in_turn(q: Quantized):
    """A Trainer that evaluates between its steps."""
    for _ in range(2):
        x = q.inputs(grad=True)
        y = q.layer.train()(x)
        yield q.right(y, x)
        y.sum().backward()
        yield q.gradient(x)
        yield q.right(evaluate(q))


@program(packs="too", bias=True)
def a_bias_that_trains_after_an_evaluation(q: Quantized):
    """The next step after an evaluation, with a bias that learns."""
    yield q.right(evaluate(q))
    q.layer.train().bias.requires_grad_(True)
    q.layer(q.x).sum().backward()
    yield close(q.layer.bias.grad, torch.full((ROWS,), 4.0), 1e-5)


@program(kinds=NF4, packs="too")
def dequantized_after_an_evaluation(q: Quantized):
    """A merge, or ``model.dequantize()``, after an evaluation."""
    evaluate(q)
    yield close(dequantize_4bit(q.layer.weight.data, q.layer.weight.quant_state), q.weight, 1e-6)


@program(kinds=BOTH, packs="too", may_raise="(?i)not supported")
def saved_after_an_evaluation(q: Quantized):
    """The state dict after an evaluation is that from before."""
    before = snapshot(q.layer)
    evaluate(q)
    after = snapshot(q.layer)
    yield same(sorted(after), sorted(before))
    for name in before:
        yield same(after[name], before[name])


@program(kinds=BOTH, packs="too")
def codes_after_an_evaluation(q: Quantized):
    """The codes of the parameter are what they were."""
    evaluate(q)
    yield same(q.layer.weight.detach().as_subclass(torch.Tensor), q.codes)


@program(packs="too")
def copied_and_moved_after_an_evaluation(q: Quantized):
    """``deepcopy`` and ``to`` after an evaluation."""
    evaluate(q)
    copied = copy.deepcopy(q.layer).to(q.device)
    yield q.right(copied(q.x))
    copied.train()
    yield close(copied(q.x), q.expected(), q.tolerance, q.rounding)


@program(packs="too")
def eval_with_a_gradient(q: Quantized):
    """Evaluation, then a gradient in eval, then evaluation."""
    yield q.right(evaluate(q))
    x = q.inputs(grad=True)
    q.layer(x).sum().backward()
    yield q.gradient(x)
    yield q.right(evaluate(q))


@program(kinds=NF4, packs="too")
def the_mode_of_a_part(q: Quantized):
    """The model is in train, its quantized base in eval, as after ``prepare_model_for_kbit_training``."""
    adapter = torch.nn.Linear(ROWS, ROWS, device=q.device)
    model = torch.nn.Sequential(q.layer.eval(), adapter)
    model.training = True
    model(q.x).sum().backward()
    yield close(adapter.weight.grad, q.expected().sum(0).expand(ROWS, -1), max(q.tolerance, 1e-4), q.rounding)


@program(kinds=NF4, packs="only", when="bitsandbytes>=0.49")
def repacked_once_by_a_training_run(q: Quantized):
    """A run that evaluates after every step: the work of an evaluation is not done again in each.

    Unpatched it is done once, for the weight stays packed, and no step after that has a gradient. What trains frees
    the memory of the copy, and only after another evaluation is it known that this one comes again.
    """
    gradients = []
    with calls_of(functional._convert_weight_packed_for_cpu) as packed:
        for _ in range(6):
            x = q.inputs(grad=True)
            q.layer.train()(x).sum().backward()
            gradients.append(x.grad is not None)
            evaluate(q)
    yield same(gradients, [True] * 6)
    yield same(packed[0] <= 2, True)


@program(kinds=NF4, packs="only", when="bitsandbytes>=0.49")
def repacked_where_it_pays(q: Quantized):
    """A forward of many rows gains nothing from the packed kernel, so nothing is packed for it."""
    with torch.no_grad(), calls_of(functional._convert_weight_packed_for_cpu) as packed:
        q.layer.eval()(q.inputs(256))
    yield same(packed[0], 0)


@program(kinds=NF4, packs="only", when="bitsandbytes>=0.49")
def decoding_is_not_slowed(q: Quantized):
    """Decoding packs once, however many tokens there are."""
    with torch.no_grad(), calls_of(functional._convert_weight_packed_for_cpu) as packed:
        for _ in range(8):
            yield q.right(q.layer.eval()(q.x[:1]), q.x[:1])
    yield same(packed[0] <= 1, True)


@program(kinds=("int8", "int8-fp16"))
def int8_state_after_an_evaluation(q: Quantized):
    """An INT8 layer trains, evaluates and is copied while it holds what its forward left."""
    yield q.right(evaluate(q))
    yield q.right(copy.deepcopy(q.layer).train()(q.x))
    yield q.right(copy.deepcopy(q.layer).eval()(q.x))
    yield q.right(evaluate(q))
