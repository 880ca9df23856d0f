"""Quantization states of 4-bit weights, written and replaced."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import nn

from .doors import FOUR, change
from .states import only
from .subject import Subject, plain_weight


# -- statistics of 4 bits


def statistics(name: str, write: Callable[[Any], None]) -> None:
    """A change of the quantization state; the weight is what the numbers stand for right after it."""

    def body(s: Subject) -> None:
        quant = s.layer.weight.quant_state
        only(quant is None or s.layer.weight.numel() != quant.shape.numel())  # not of what was dequantized in place
        write(quant)
        s.becomes(plain_weight(s.layer))

    body.__name__ = name
    change(*FOUR)(body)


def _outer(quant: Any) -> Any:
    return quant.state2 if quant.nested else quant


def _put(thing: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(thing, name, make(getattr(thing, name)))


def _offset(quant: Any, factor: float) -> None:
    only(quant.nested)
    quant.offset = quant.offset * factor


statistics("absmax_replaced", lambda q: _put(_outer(q), "absmax", lambda t: t * 2))
statistics("absmax_equal_object", lambda q: _put(q, "absmax", torch.clone))
statistics("absmax_in_place", lambda q: _outer(q).absmax.mul_(2) is None)
statistics("absmax_data", lambda q: _put(_outer(q).absmax, "data", lambda t: t * 2))
statistics("absmax_numpy", lambda q: _outer(q).absmax.numpy().__imul__(2) is None)
statistics("absmax_parameter", lambda q: _put(q, "absmax", lambda t: nn.Parameter(t.clone(), requires_grad=False)))
statistics("absmax_half", lambda q: _put(_outer(q), "absmax", lambda t: t.half()))
statistics("absmax_double", lambda q: _put(_outer(q), "absmax", lambda t: (t * 2).double()))
statistics("offset_replaced", lambda q: _offset(q, 2.0))
statistics("codebook_replaced", lambda q: _put(q, "code", lambda t: t * 2))
statistics("codebook_flipped", lambda q: _put(q, "code", lambda t: t.flip(0)))
statistics("statistics_dtype", lambda q: setattr(q, "dtype", torch.bfloat16))
statistics("statistics_moved", lambda q: q.to("cpu") and None)


@change(*FOUR)
def statistics_inference(s: Subject) -> None:
    with torch.inference_mode():
        quant = s.layer.weight.quant_state
        _outer(quant).absmax = _outer(quant).absmax * 2
    s.becomes(plain_weight(s.layer))


@change(*FOUR)
def statistics_copied(s: Subject) -> None:
    s.layer.weight.quant_state = copy.deepcopy(s.layer.weight.quant_state)


@change(*FOUR)
def statistics_pickled(s: Subject) -> None:
    s.layer.weight.quant_state = pickle.loads(pickle.dumps(s.layer.weight.quant_state))


@change(*FOUR)
def statistics_from_dict(s: Subject) -> None:
    packed = s.layer.weight.quant_state.as_dict(packed=True)
    s.layer.weight.quant_state = QuantState.from_dict(packed, device=torch.device("cpu"))


@change(*FOUR)
def statistics_of_another(s: Subject) -> None:
    layer, weight = s.donor()
    s.layer.weight.data.copy_(layer.weight.data)
    s.layer.weight.quant_state = layer.weight.quant_state
    s.becomes(weight)


@change(*FOUR)
def statistics_of_another_on_both(s: Subject) -> None:
    layer, weight = s.donor()
    s.layer.weight.data = layer.weight.data
    s.layer.weight.quant_state = s.layer.quant_state = layer.weight.quant_state
    s.becomes(weight)


@change(*FOUR)
def statistics_none(s: Subject) -> None:
    s.layer.weight.quant_state = None


@change("4bit")
def statistics_of_the_layer(s: Subject) -> None:
    """The layer's own reference, which the weight's should win over."""
    s.layer.quant_state = copy.deepcopy(s.layer.weight.quant_state)
