"""Quantization states of 4-bit weights, written and replaced."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import nn

from .doors import FOUR, change, stored
from .states import only
from .subject import Subject


# -- statistics of 4 bits


def statistics(name: str, write: Callable[[Any], None]) -> None:
    """A change of the quantization state; the weight is what the numbers stand for right after it."""

    def body(s: Subject) -> None:
        quant = s.layer.weight.quant_state
        only(quant is None or _is_read_with(quant, s))
        s.becomes_what_it_holds(lambda: write(quant))

    body.__name__ = name
    change(*FOUR)(body)


def _is_read_with(quant: QuantState, s: Subject) -> bool:
    """Whether the weight is packed: one that was dequantized in place is right without its statistics."""
    return s.layer.weight.numel() != quant.shape.numel()


def _outer(quant: Any) -> Any:
    return quant.state2 if quant.nested else quant


def _put(thing: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(thing, name, make(getattr(thing, name)))


def _gains(count: int) -> torch.Tensor:
    return torch.logspace(-1, 1, count, dtype=torch.float32, device="cpu")


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
statistics("absmax_equalized", lambda q: _outer(q).absmax.mul_(_gains(_outer(q).absmax.numel())) is None)
statistics("codebook_half", lambda q: _put(q, "code", lambda t: t.half()))
statistics("statistics_blocksize", lambda q: setattr(q, "blocksize", q.blocksize * 2))
statistics("statistics_moved", lambda q: q.to("cpu") and None)


@change(*FOUR)
def statistics_inference(s: Subject) -> None:
    quant = s.layer.weight.quant_state

    def write() -> None:
        with torch.inference_mode():
            _outer(quant).absmax = _outer(quant).absmax * 2

    s.becomes_what_it_holds(write)


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
    stored(s)
    layer, weight = s.donor()
    s.layer.weight.data.copy_(layer.weight.data)
    s.layer.weight.quant_state = layer.weight.quant_state
    s.becomes(weight)


@change(*FOUR)
def statistics_of_another_on_both(s: Subject) -> None:
    stored(s)
    layer, weight = s.donor()
    s.layer.weight.data = layer.weight.data
    s.layer.weight.quant_state = s.layer.quant_state = layer.weight.quant_state
    s.becomes(weight)


def broken(name: str, write: Callable[[Any], None]) -> None:
    """A change after which no number is right: the layer has to say so."""

    def body(s: Subject) -> None:
        quant = s.layer.weight.quant_state
        only(quant is not None and _is_read_with(quant, s))
        write(quant)
        s.becomes(torch.full(s.weight.shape, float("nan")))

    body.__name__ = name
    change(*FOUR)(body)


broken("absmax_none", lambda q: setattr(q, "absmax", None))
broken("absmax_cut", lambda q: _put(q, "absmax", lambda t: t[: t.numel() // 2].clone()))
broken("absmax_on_meta", lambda q: _put(q, "absmax", lambda t: t.to("meta")))
broken("codebook_none", lambda q: setattr(q, "code", None))
broken("codebook_cut", lambda q: _put(q, "code", lambda t: t[:8].clone()))
broken("offset_none", lambda q: only(q.nested) or setattr(q, "offset", None))


@change(*FOUR)
def statistics_none(s: Subject) -> None:
    s.layer.weight.quant_state = None


@change("4bit")
def statistics_of_the_layer(s: Subject) -> None:
    """The layer's own reference, which the weight's should win over."""
    s.layer.quant_state = copy.deepcopy(s.layer.weight.quant_state)
