"""Weights written again: through ``.data``, ``copy_``, numpy, ``set_``; layers streamed through one buffer.

Every program infers, writes, and infers again: what the second forward uses must be what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, INT8, NF4, Quantized, dequantized

WITH_BF16 = (*NF4, "nf4-bf16")
KEPT = {"int8": "an INT8 layer goes on with the codes of its first forward when the weight is another"}
VIEWS = "(?i)shape|size|numel|inference"


def statistics(layer: Any) -> list[torch.Tensor]:
    """Every tensor of a layer's statistics, to be written over."""
    if not hasattr(layer.weight, "quant_state"):
        return [layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB]
    state = layer.weight.quant_state
    return [state.absmax, *((state.state2.absmax, state.offset) if state.nested else ())]


def infer(q: Quantized, x: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return q.layer.eval()(q.x if x is None else x)


def refilled(q: Quantized, write: Callable[[torch.Tensor, torch.Tensor], None]):
    """Infer, ``write(tensor, new)`` for codes and statistics, infer: the second output is that of the new weight."""
    new = q.other()
    yield q.right(infer(q))
    for old, fresh in zip([q.layer.weight, *statistics(q.layer)], [new.codes, *statistics(new.layer)]):
        write(old, fresh)
    yield new.right(infer(q))


@program(kinds=(*WITH_BF16, *INT8), packs="too", may_raise=VIEWS)
def data_copy(q: Quantized):
    """``weight.data.copy_(new)``, which counts no version."""
    yield from refilled(q, lambda old, new: old.data.copy_(new))


@program(kinds=(*NF4, *INT8), packs="too", may_raise=VIEWS)
def copy_without_grad(q: Quantized):
    """``weight.copy_(new)`` under ``no_grad``."""

    @torch.no_grad()
    def write(old: torch.Tensor, new: torch.Tensor) -> None:
        old.copy_(new)

    yield from refilled(q, write)


@program(kinds=NF4, packs="too", may_raise=VIEWS)
def copy_in_inference_mode(q: Quantized):
    """``weight.copy_(new)`` under ``inference_mode``, on weights made in it."""
    with torch.inference_mode():
        made = q.other(seed=0)
        yield from refilled(made, lambda old, new: old.copy_(new))


@program(packs="too", unrepaired=KEPT)
def new_data(q: Quantized):
    """``weight.data = new``."""

    def write(old: torch.Tensor, new: torch.Tensor) -> None:
        old.data = new.clone()

    yield from refilled(q, write)


@program(kinds=(*NF4, *INT8), packs="too", devices=["cpu"], may_raise=VIEWS)
def written_by_numpy(q: Quantized):
    """An array that shares the weight's memory is written, as by a memory map or another library."""

    def write(old: torch.Tensor, new: torch.Tensor) -> None:
        old.detach().numpy()[...] = new.numpy()

    yield from refilled(q, write)


@program(packs="too", unrepaired=KEPT, may_raise=VIEWS)
def set_to_other_storage(q: Quantized):
    """``weight.set_(new)``."""

    @torch.no_grad()
    def write(old: torch.Tensor, new: torch.Tensor) -> None:
        old.set_(new.clone())

    yield from refilled(q, write)


@program(packs="too")
def another_parameter(q: Quantized):
    """``layer.weight = other.weight``."""
    new = q.other()
    yield q.right(infer(q))
    q.layer.weight = new.layer.weight
    yield new.right(infer(q))


@program(kinds=NF4, packs="too", may_raise=VIEWS)
def a_buffer_as_data(q: Quantized):
    """The weight lives in a buffer of the user's own, which is written when the next layer comes."""
    new, buffer = q.other(), q.codes.clone()
    q.layer.weight.data = buffer
    yield q.right(infer(q))
    buffer.copy_(new.codes)
    for old, fresh in zip(statistics(q.layer), statistics(new.layer)):
        old.copy_(fresh)
    q.layer.weight.data = buffer
    yield new.right(infer(q))


@program(kinds=NF4, packs="too", may_raise=VIEWS)
def layers_streamed_through_one_buffer(q: Quantized):
    """Three layers, one buffer for their codes, twice over."""
    layers = [q, q.other(1), q.other(2)]
    buffer = torch.empty_like(q.codes)
    for _ in range(2):
        for each in layers:
            buffer.copy_(each.codes)
            each.layer.weight.data = buffer
            yield each.right(infer(each))


@program(kinds=NF4, packs="too", may_raise=VIEWS)
def a_stream_in_training(q: Quantized):
    """The same with gradients: each layer is read in before its forward, and again before its backward."""
    buffer = torch.empty_like(q.codes)
    for each in (q, q.other()):
        buffer.copy_(each.codes)
        each.layer.weight.data = buffer
        x = q.inputs(grad=True)
        each.layer.train()(x).sum().backward()
        yield each.gradient(x)


@program(kinds=BOTH, may_raise="modified by an inplace operation")
def refilled_before_backward(q: Quantized):
    """The next layer is read into the weight before the backward of this one: no gradient can be right."""
    x, new = q.inputs(grad=True), q.other()
    y = q.layer(x).sum()
    with torch.no_grad():
        q.layer.weight.copy_(new.codes)
    y.backward()
    yield q.gradient(x)


@program(kinds=(*NF4, *INT8), packs="too")
def scales_multiplied(q: Quantized):
    """The scales are multiplied in place, as to fold a factor into the weight."""
    yield q.right(infer(q))
    state = getattr(q.layer.weight, "quant_state", None)
    scales = statistics(q.layer)[1:] if state is not None and state.nested else statistics(q.layer)
    for scale in scales:
        scale.data.mul_(3)
    yield close(infer(q), 3 * q.expected(), q.tolerance, q.rounding)


@program(kinds=NF4, packs="too", devices=["cpu"], may_raise=VIEWS)
def a_few_codes_by_numpy(q: Quantized):
    """One row is edited outside of torch."""
    yield q.right(infer(q))
    array = q.layer.weight.detach().numpy().reshape(-1)
    array[5 * 64 : 6 * 64] = array[6 * 64 : 7 * 64]
    codes = q.codes.clone().view(-1)
    codes[5 * 64 : 6 * 64] = codes[6 * 64 : 7 * 64]
    row = q.other(seed=0)
    row.layer.weight.data.view(-1).copy_(codes)
    q.weight = dequantized(row.layer)[0]
    yield q.right(infer(q))


@program(kinds=NF4, packs="too", may_raise=VIEWS)
def random_codes(q: Quantized):
    """A baseline: the codes are replaced by noise."""
    yield q.right(infer(q))
    noise = torch.randint(0, 256, q.codes.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    q.layer.weight.data.copy_(noise)
    fresh = q.other(seed=0)
    fresh.layer.weight.data.copy_(noise)
    q.weight = dequantized(fresh.layer)[0]
    yield q.right(infer(q))


@program(kinds=("int8-fp16",))
def averaged_weights_for_evaluation(q: Quantized):
    """Weights that train in INT8: evaluate, swap the averaged ones in, evaluate, swap back, evaluate."""
    live, averaged = q.layer.weight.detach().clone(), q.other().weight
    yield q.right(infer(q))
    q.layer.weight.data.copy_(averaged)
    yield q.other().right(infer(q))
    q.layer.weight.data.copy_(live)
    yield q.right(infer(q))


@program(kinds=("int8-fp16",), devices=["cpu"])
def training_weights_written_by_numpy(q: Quantized):
    """The same written by another library."""
    yield q.right(infer(q))
    q.layer.weight.detach().numpy()[...] = q.other().weight.numpy()
    yield q.other().right(infer(q))


@program(kinds=("int8-fp16",))
def steps_of_an_optimizer(q: Quantized):
    """INT8 with float weights, trained by hand: forward, backward, a step, and the next forward."""
    q.layer.requires_grad_(True)
    for _ in range(2):
        q.layer.zero_grad(set_to_none=False)
        q.layer(q.x).square().sum().backward()
        with torch.no_grad():
            q.layer.weight -= 0.05 * q.layer.weight.grad
        yield close(q.layer(q.x), q.x @ q.layer.weight.detach().T, q.tolerance)


@program(kinds=(*NF4, *INT8), bias=True)
def a_bias_written(q: Quantized):
    """The bias is read in anew between two forwards."""
    yield q.right(infer(q))
    q.layer.bias.data.copy_(torch.arange(len(q.bias), device=q.device))
    q.bias = torch.arange(len(q.bias), device=q.device).float()
    yield q.right(infer(q))


@program(packs="too", unrepaired=KEPT)
def weights_of_two_models_swapped(q: Quantized):
    """Two copies of a model exchange their parameters between calls."""
    new = q.other()
    yield q.right(infer(q))
    yield new.right(infer(new))
    q.layer.weight, new.layer.weight = new.layer.weight, q.layer.weight
    yield new.right(infer(q))
    yield q.right(infer(new))


@program(kinds=NF4, packs="too")
def a_weight_pruned(q: Quantized):
    """All codes become that of zero: so must the output."""
    zero = int((q.layer.weight.quant_state.code == 0).nonzero()[0])
    yield q.right(infer(q))
    q.layer.weight = type(q.layer.weight)(
        torch.full_like(q.codes, zero * 17), requires_grad=False, quant_state=q.layer.weight.quant_state,
        quant_type="nf4", bnb_quantized=True,
    )  # fmt: skip
    if q.scales.min() > 0:
        yield same(infer(q).abs().max() < 1e-3, torch.tensor(True, device=q.device))
