"""The weight itself, replaced."""

from __future__ import annotations

import copy
import pickle

import bitsandbytes as bnb
import torch
from torch import nn

from .doors import ALL, INT8, QUANTIZED, change, fresh_weight, stored
from .states import only
from .subject import Subject, random


# -- the weight itself


@change(*ALL)
def weight_of_another(s: Subject) -> None:
    layer, weight = s.donor()
    s.layer.weight = layer.weight
    s.becomes(weight)


@change("int8", "4bit")
def weight_of_another_that_ran(s: Subject) -> None:
    layer, weight = s.donor()
    with torch.no_grad():
        layer(s.x())
    s.layer.weight = layer.weight
    s.becomes(weight)


@change(*ALL)
def weight_copied(s: Subject) -> None:
    s.layer.weight = copy.deepcopy(s.layer.weight)


@change(*ALL)
def weight_copied_shallowly(s: Subject) -> None:
    s.layer.weight = copy.copy(s.layer.weight)


@change(*ALL)
def weight_pickled(s: Subject) -> None:
    s.layer.weight = pickle.loads(pickle.dumps(s.layer.weight))


@change(*QUANTIZED)
def weight_plain_codes(s: Subject) -> None:
    layer, weight = s.donor()
    codes, own = layer.weight.data.clone(), s.layer.weight.data
    only(own.is_meta or own.dtype != codes.dtype or not torch.equal(own, codes))  # else weight_plain_own_codes
    s.layer.weight = nn.Parameter(codes, requires_grad=False)
    s.becomes(weight)


@change(*QUANTIZED)
def weight_plain_own_codes(s: Subject) -> None:
    s.layer.weight = nn.Parameter(s.layer.weight.data.clone(), requires_grad=False)


@change(*ALL)
def weight_plain_float(s: Subject) -> None:
    s.layer.weight = nn.Parameter(random(4), requires_grad=False)
    s.becomes(random(4), s.kind.requantized)


@change(*ALL)
def weight_trainable_float(s: Subject) -> None:
    s.layer.weight = nn.Parameter(random(4))
    s.becomes(random(4), s.kind.requantized)


@change(*ALL)
def weight_data_float(s: Subject) -> None:
    stored(s)
    s.layer.weight.data = random(4)
    s.becomes(random(4), s.kind.requantized)


@change(*INT8)
def weight_codes_as_float(s: Subject) -> None:
    layer, weight = s.donor()
    s.layer.weight = nn.Parameter(layer.weight.detach().float(), requires_grad=False)
    s.becomes(weight)


@change("int8")
def weight_data_cast(s: Subject) -> None:
    """The codes as floating point numbers, in place."""
    stored(s)
    s.layer.weight.data = s.layer.weight.data.half()


@change(*ALL)
def weight_requires_grad(s: Subject) -> None:
    s.layer.weight.requires_grad_(True)


@change(*ALL)
def weight_swapped(s: Subject) -> None:
    stored(s)
    layer, weight = s.donor()
    torch.utils.swap_tensors(s.layer.weight, layer.weight)
    s.becomes(weight)


@change("int8-float")
def weight_set_data(s: Subject) -> None:
    stored(s)
    layer, weight = s.donor()
    with torch.no_grad():
        s.layer.weight.copy_(layer.weight)
    s.becomes(weight)


@change(*ALL)
def weight_fresh(s: Subject) -> None:
    s.layer.weight = fresh_weight(s)
    s.becomes(random(4), s.kind.requantized)


@change(*ALL)
def weight_quantized_anew(s: Subject) -> None:
    s.layer.weight = fresh_weight(s).to("cpu")
    s.becomes(random(4), s.kind.requantized)


@change(*ALL)
def weight_fresh_and_moved(s: Subject) -> None:
    s.layer.weight = fresh_weight(s)
    s.root.to("cpu")
    s.becomes(random(4), s.kind.requantized)


@change("4bit")
def weight_prequantized(s: Subject) -> None:
    layer, weight = s.donor()
    packed = layer.weight.quant_state.as_dict(packed=True)
    s.layer.weight = bnb.nn.Params4bit.from_prequantized(layer.weight.data, packed, device="cpu")
    s.becomes(weight)


@change(*QUANTIZED)
def weight_deleted(s: Subject) -> None:
    weight = s.layer.weight
    del s.layer.weight
    s.layer.weight = weight


@change(*ALL)
def weight_registered(s: Subject) -> None:
    layer, weight = s.donor()
    s.layer.register_parameter("weight", layer.weight)
    s.becomes(weight)


@change(*QUANTIZED)
def weight_buffer(s: Subject) -> None:
    weight = s.layer.weight
    del s.layer.weight
    s.layer.register_buffer("weight", weight.data.clone())
