"""The same changes through doors that users meet less often: numpy, inference mode, swapping, pruning, another device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from torch.nn.utils import prune

from .doors import ALL, CHANGES, FOUR, INT8, QUANTIZED, change, owner
from .states import only
from .subject import ROWS, Subject, random

NOTHING = torch.full((1,), float("nan"))
"""No result is right: what the user set has no meaning, and only an error says so."""


def meaningless(s: Subject) -> None:
    s.becomes(NOTHING.expand(s.weight.shape))


# -- packed weights


@change(*INT8)
def codes_numpy(s: Subject) -> None:
    s.layer.weight.detach().numpy()[:] *= -1
    s.becomes(-s.weight, s.slack)


@change(*INT8)
def codes_inference_in_place(s: Subject) -> None:
    only("weight" in s.layer._parameters)  # what a parametrization makes is made anew
    with torch.inference_mode():
        s.layer.weight.neg_()
    s.becomes(-s.weight, s.slack)


@change("int8")
def codes_of_state_none(s: Subject) -> None:
    s.layer.state.CB = None


@change(*FOUR)
def packed_numpy(s: Subject) -> None:
    layer, _ = s.donor()
    packed, other = (each.weight.data.view(torch.uint8).numpy() for each in (s.layer, layer))
    s.becomes_what_it_holds(lambda: packed.__setitem__(slice(None), other))


@change(*FOUR)
def packed_inference(s: Subject) -> None:
    layer, _ = s.donor()

    def write() -> None:
        with torch.inference_mode():
            s.layer.weight.data = layer.weight.data.clone()

    s.becomes_what_it_holds(write)


@change(*FOUR)
def packed_rows_permuted(s: Subject) -> None:
    """Whole rows, with their blocks of absmax."""
    quant, order = s.layer.weight.quant_state, torch.arange(ROWS - 1, -1, -1)
    only(s.weight.shape[0] == ROWS and quant.absmax.numel() % ROWS == 0)
    packed = s.layer.weight.data
    s.layer.weight.data = packed.reshape(ROWS, -1)[order].reshape(packed.shape).clone()
    quant.absmax = quant.absmax.reshape(ROWS, -1)[order].reshape(-1).clone()
    only(not quant.nested or quant.state2.absmax.numel() == 1)
    s.rows_become(order)


@change(*QUANTIZED)
def packed_cut(s: Subject) -> None:
    """Half of the packed weights, and nothing else."""
    only(not s.offloaded and "weight" in s.layer._parameters)  # what a parametrization makes is made anew
    rows = s.layer.weight.data.shape[0] // 2
    s.layer.weight.data = s.layer.weight.data[:rows].clone()
    meaningless(s)


# -- the whole weight


@change(*ALL)
def weight_none(s: Subject) -> None:
    s.layer.weight = None
    meaningless(s)


@change(*ALL)
def weight_made_in_inference_mode(s: Subject) -> None:
    with torch.inference_mode():
        layer, weight = s.donor()
    s.layer.weight = layer.weight
    s.becomes(weight.clone())


@change(*ALL)
def pruned(s: Subject) -> None:
    """By the mask that keeps all, so that the weight is an attribute that a hook makes."""
    only(not s.adapter and not s.offloaded)
    prune.identity(s.layer, "weight")


# -- modules that swap or overwrite their parameters


@contextlib.contextmanager
def _set(switch: Callable[[bool], None]) -> Iterator[None]:
    switch(True)
    try:
        yield
    finally:
        switch(False)


swapping = functools.partial(_set, torch.__future__.set_swap_module_params_on_conversion)
overwriting = functools.partial(_set, torch.__future__.set_overwrite_module_params_on_conversion)


def under(
    name: str, context: Callable[[], contextlib.AbstractContextManager[Any]], do: str, whole: bool = True
) -> None:
    """The change ``do`` under ``context``."""

    def body(s: Subject) -> None:
        with context():
            CHANGES[do].body(s)

    body.__name__ = name
    change(*CHANGES[do].families, whole=whole)(body)


under("cast_half_swapping", swapping, "cast_half")
under("moved_swapping", swapping, "moved")
under("loads_swapping", swapping, "loads", whole=False)
under("loads_into_fresh_swapping", swapping, "loads_into_fresh", whole=False)
under("weight_fresh_and_moved_swapping", swapping, "weight_fresh_and_moved", whole=False)
under("cast_half_overwriting", overwriting, "cast_half")
under("moved_overwriting", overwriting, "moved")
under("weight_fresh_and_moved_overwriting", overwriting, "weight_fresh_and_moved", whole=False)
under("loads_in_inference_mode", torch.inference_mode, "loads", whole=False)
under("loads_assigning_in_inference_mode", torch.inference_mode, "loads_assigning", whole=False)
under("moved_in_inference_mode", torch.inference_mode, "moved")


@change(*ALL)
def default_dtype_double(s: Subject) -> None:
    torch.set_default_dtype(torch.float64)


@change(*ALL)
def moved_to_meta(s: Subject) -> None:
    only(not s.offloaded)
    s.root.to("meta")
    meaningless(s)


@change(*ALL)
def moved_to_meta_and_loaded(s: Subject) -> None:
    """Emptied, and filled again from its own file."""
    only(not s.offloaded and not hasattr(s.layer, "parametrizations"))
    saved = {key: value.clone() for key, value in s.root.state_dict().items()}
    s.root.to("meta")
    s.root.load_state_dict(saved, assign=True)


@change(*ALL)
def emptied_and_loaded(s: Subject) -> None:
    """``to_empty`` and the own file, as FSDP and pipelines begin."""
    only(not s.offloaded and not hasattr(s.layer, "parametrizations"))
    saved = {key: value.clone() for key, value in s.root.state_dict().items()}
    s.root.to_empty(device="cpu")
    s.root.load_state_dict(saved)


@change(*INT8)
def scales_cut(s: Subject) -> None:
    owner(s).SCB = owner(s).SCB[: ROWS // 2].clone()
    meaningless(s)


@change("float", "stable")
def weight_in_place(s: Subject) -> None:
    with torch.no_grad():
        s.layer.weight.copy_(random(4))
    s.becomes(random(4))


@change("float", "stable")
def weight_parameter(s: Subject) -> None:
    s.layer.weight = nn.Parameter(random(4))
    s.becomes(random(4))


@change("stable")
def trained_by_adam8bit(s: Subject) -> None:
    """By an optimizer that notes the place of the parameter, as one of the whole model does."""
    only(type(s.layer.weight) is nn.Parameter and not s.offloaded)
    weight, plain = s.layer.weight.requires_grad_(True), nn.Parameter(s.weight.clone())
    optimizers = bnb.optim.Adam8bit([weight], lr=1e-2), torch.optim.Adam([plain], lr=1e-2)
    weight.grad, plain.grad = random(23), random(23)
    for optimizer in optimizers:
        optimizer.step()
    weight.grad = None
    s.becomes(plain)
