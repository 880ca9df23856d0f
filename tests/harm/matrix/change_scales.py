"""Codes, scales and quantization states, written and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn


from .doors import FOUR, INT8, change, owner, stored
from .states import only
from .subject import ROWS, Subject, random


# -- scales of INT8


def scales(name: str, make: Callable[[torch.Tensor], Any], gain: Callable[[], Any] | float | None = 2.0) -> None:
    """A change that replaces the scales by what ``make`` gives; the weight is multiplied by ``gain``."""

    def body(s: Subject) -> None:
        before = owner(s).SCB
        owner(s).SCB = make(before)
        factor = gain() if callable(gain) else gain
        if factor is None:
            codes = s.layer.weight.data.detach().as_subclass(torch.Tensor).float()
            s.becomes(codes * owner(s).SCB.detach().float().reshape(-1, 1) / 127, s.slack)
        else:
            s.becomes(s.weight * factor, s.slack)

    body.__name__ = name
    change(*INT8)(body)


def gains() -> torch.Tensor:
    return torch.logspace(-1, 1, ROWS, dtype=torch.float32, device="cpu")


scales("scales_replaced", lambda t: t * 2)
scales("scales_equalized", lambda t: t * gains(), lambda: gains()[:, None])
scales("scales_equal_object", lambda t: t.clone(), 1.0)
scales("scales_parameter", lambda t: nn.Parameter(t * 2, requires_grad=False))
scales("scales_half", lambda t: (t * 2).half(), None)
scales("scales_bf16", lambda t: (t * 2).bfloat16(), None)
scales("scales_double", lambda t: (t * 2).double())
scales("scales_column", lambda t: (t * 2)[:, None])
scales("scales_none", lambda t: None, 1.0)
scales("scales_not_contiguous", lambda t: torch.stack((t * 2, t), 1)[:, 0])
scales("scales_of_numpy", lambda t: torch.from_numpy((t * 2).numpy()))
scales("scales_buffer", lambda t: nn.Buffer(t * 2))
scales("scales_one_for_all", lambda t: t.mean()[None], None)
scales("scales_on_meta", lambda t: t.to("meta"), 1.0)
scales("scales_of_another", lambda t: t.flip(0), None)


@change(*INT8)
def scales_in_place(s: Subject) -> None:
    owner(s).SCB.mul_(2)
    s.becomes(s.weight * 2, s.slack)


@change(*INT8)
def scales_data(s: Subject) -> None:
    owner(s).SCB.data = owner(s).SCB.data * 2
    s.becomes(s.weight * 2, s.slack)


@change(*INT8)
def scales_data_in_place(s: Subject) -> None:
    owner(s).SCB.data.mul_(2)
    s.becomes(s.weight * 2, s.slack)


@change(*INT8)
def scales_numpy(s: Subject) -> None:
    owner(s).SCB.numpy()[:] *= 2
    s.becomes(s.weight * 2, s.slack)


@change(*INT8)
def scales_inference(s: Subject) -> None:
    with torch.inference_mode():
        owner(s).SCB = owner(s).SCB * 2
    s.becomes(s.weight * 2, s.slack)


@change(*INT8)
def scales_inference_in_place(s: Subject) -> None:
    with torch.inference_mode():
        owner(s).SCB.mul_(2)
    s.becomes(s.weight * 2, s.slack)


@change(*INT8)
def rows_permuted(s: Subject) -> None:
    order = torch.arange(ROWS - 1, -1, -1)
    s.layer.weight.data.copy_(s.layer.weight.data[order].clone())
    owner(s).SCB = owner(s).SCB[order].clone()
    s.rows_become(order)


@change(*INT8)
def rows_permuted_in_place(s: Subject) -> None:
    order = torch.arange(ROWS - 1, -1, -1)
    s.layer.weight.data.copy_(s.layer.weight.data[order].clone())
    owner(s).SCB.copy_(owner(s).SCB[order].clone())
    s.rows_become(order)


@change("int8")
def streamed(s: Subject) -> None:
    """Codes and scales of another layer are put where forward takes them from again."""
    only("weight" in s.layer._parameters)  # a parametrization makes another tensor in each call
    layer, weight = s.donor()
    s.layer.weight.data = layer.weight.data
    s.layer.weight.CB, s.layer.weight.SCB = layer.weight.data, layer.weight.SCB
    s.becomes(weight)


@change("int8")
def streamed_into_state(s: Subject) -> None:
    layer, weight = s.donor()
    only(s.layer.state.CB is not None)
    s.layer.state.CB, s.layer.state.SCB = layer.weight.data, layer.weight.SCB
    s.becomes(weight)


@change("int8")
def streamed_into_all(s: Subject) -> None:
    layer, weight = s.donor()
    only(s.layer.state.CB is not None)
    s.layer.weight.data = layer.weight.data
    s.layer.state.CB, s.layer.state.SCB = layer.weight.data, layer.weight.SCB
    s.becomes(weight)


@change("int8")
def settled_by_hand(s: Subject) -> None:
    only(s.layer.weight.CB is not None)
    s.layer.init_8bit_state()


@change("int8")
def threshold_changed(s: Subject) -> None:
    s.layer.state.threshold = 0.0 if s.layer.state.threshold else 6.0


@change("int8")
def gradients_of_state_reset(s: Subject) -> None:
    s.layer.state.reset_grads()


@change("int8")
def state_made_anew(s: Subject) -> None:
    """As a layer that starts over: a new state, its weight quantized again."""
    threshold = s.layer.state.threshold
    s.layer.state = bnb.MatmulLtState()
    s.layer.state.threshold, s.layer.state.has_fp16_weights = threshold, False
    s.layer.weight = bnb.nn.Int8Params(random(4), requires_grad=False, has_fp16_weights=False).to("cpu")
    s.becomes(random(4), 0.03)


# -- codes


@change(*INT8)
def codes_in_place(s: Subject) -> None:
    stored(s)
    s.layer.weight.data.neg_()
    s.becomes(-s.weight, s.slack)


@change(*INT8)
def codes_replaced(s: Subject) -> None:
    stored(s)
    s.layer.weight.data = -s.layer.weight.data
    s.becomes(-s.weight, s.slack)


@change("int8")
def codes_of_state_replaced(s: Subject) -> None:
    only(s.layer.state.CB is not None and not s.layer.weight.is_floating_point())  # beside floats they have no meaning
    s.layer.state.CB = -s.layer.state.CB
    s.becomes(-s.weight, s.slack)


@change(*FOUR)
def packed_in_place(s: Subject) -> None:
    layer, _ = s.donor()
    s.becomes_what_it_holds(lambda: s.layer.weight.data.copy_(layer.weight.data))


@change(*FOUR)
def packed_replaced(s: Subject) -> None:
    layer, _ = s.donor()
    s.becomes_what_it_holds(lambda: setattr(s.layer.weight, "data", layer.weight.data.clone()))


@change(*FOUR)
def packed_lying(s: Subject) -> None:
    s.layer.weight.data = s.layer.weight.data.reshape(1, -1)


@change("4bit")
def packed_viewed(s: Subject) -> None:
    """The same bytes under another dtype."""
    storage = torch.uint8 if s.layer.weight.dtype != torch.uint8 else torch.bfloat16
    s.layer.weight.data = s.layer.weight.data.view(-1).view(storage).view(-1, 1)
