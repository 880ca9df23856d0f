"""Calls with other parameters, casts, moves, copies, other classes and defaults."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrize


from .doors import ALL, INT8, QUANTIZED, change, owner
from .states import only
from .subject import ROWS, Holder, Subject, random


# -- calls with other parameters


def functionally(name: str, make: Callable[[Subject], tuple[Any, torch.Tensor, float]],
                 families: tuple[str, ...] = ALL) -> None:  # fmt: skip
    def body(s: Subject) -> None:
        only(s.call is None and not s.adapter and not s.offloaded)
        value, weight, slack = make(s)
        root, key = s.root, f"{s.path}.weight"
        s.call, s.given = lambda x: functional_call(root, {key: value}, (x,)), True
        s.becomes(weight, slack)

    body.__name__ = name
    change(*families)(body)


def _given(pick: Callable[[Any], Any]) -> Callable[[Subject], tuple[Any, torch.Tensor, float]]:
    def make(s: Subject) -> tuple[Any, torch.Tensor, float]:
        layer, weight = s.donor(5)  # codes that no other step brings: the layer's own have the layer's scales
        return pick(layer), weight, 0.0

    return make


functionally("call_with_weight", _given(lambda layer: layer.weight))
functionally("call_with_detached", _given(lambda layer: layer.weight.detach().clone()))
functionally("call_with_plain", _given(lambda layer: layer.weight.data.clone()), QUANTIZED)
functionally("call_with_codes_as_floats", _given(lambda layer: layer.weight.detach().float()), INT8)
functionally("call_with_floats", lambda s: (random(4), random(4), s.kind.requantized))
functionally("call_with_own", lambda s: (s.layer.weight, s.weight, s.slack))
functionally("call_with_own_detached", lambda s: (s.layer.weight.detach().clone(), s.weight, s.slack))


@change(*ALL)
def call_stacked(s: Subject) -> None:
    """One model of an ensemble, as ``stack_module_state`` gives its parameters."""
    only(s.call is None and not s.adapter and not s.offloaded and not s.tied)
    layer, weight = s.donor(5)
    parameters, buffers = stack_module_state([copy.deepcopy(s.root), Holder(layer)])
    root = s.root
    given = {key: value[1] for key, value in {**parameters, **buffers}.items()}
    s.call, s.given = lambda x: functional_call(root, given, (x,)), True
    s.becomes(weight)
    s.bias = layer.bias.detach().float().clone() if s.bias is not None else None


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Same(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


@change(*ALL)
def parametrized(s: Subject) -> None:
    only(not s.adapter and not s.offloaded)
    parametrize.register_parametrization(s.layer, "weight", Same(), unsafe=True)


@change("int8-float", "embedding4", "embedding8", "int8", "4bit")
def parametrized_floats(s: Subject) -> None:
    only(not s.adapter and not s.offloaded)
    s.layer.weight = nn.Parameter(random(4), requires_grad=False)
    parametrize.register_parametrization(s.layer, "weight", Twice())
    s.becomes(random(4) * 2, s.kind.requantized)


# -- casts, moves, copies of the whole


def whole(name: str, do: Callable[[Any], Any], off: float = 0.0, offloaded: bool = False) -> None:
    def body(s: Subject) -> None:
        do(s.root)
        s.slack = max(s.slack, off)
        if s.bias is not None:
            s.bias = s.bias.float()

    body.__name__ = name
    change(*ALL, whole=True, offloaded=offloaded)(body)


whole("cast_half", lambda m: m.half(), 2e-3)
whole("cast_bfloat16", lambda m: m.bfloat16(), 1e-2)
whole("cast_float", lambda m: m.float())
whole("cast_double", lambda m: m.double())
whole("cast_there_and_back", lambda m: m.half().float(), 2e-3)
whole("cast_with_device", lambda m: m.to("cpu", torch.bfloat16), 1e-2)
whole("moved", lambda m: m.to("cpu"))
whole("moved_by_cpu", lambda m: m.cpu())
whole("applied_clone", lambda m: m._apply(lambda t: t.clone()))
whole("shared_memory", lambda m: m.share_memory())
whole("frozen", lambda m: m.requires_grad_(False), offloaded=True)
whole("set_to_train", lambda m: m.train(), offloaded=True)
whole("set_to_eval", lambda m: m.eval(), offloaded=True)
whole("zeroed_gradients", lambda m: m.zero_grad(), offloaded=True)


@change(*ALL)
def moved_to_meta_and_back(s: Subject) -> None:
    """A copy goes to meta; the original stays."""
    only(s.call is None)
    copy.deepcopy(s.root).to("meta")


@change(*ALL)
def copied_deeply(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    s.root = copy.deepcopy(s.root)


@change(*ALL)
def copied_and_original_changed(s: Subject) -> None:
    """A copy is a copy: what is written to the original does not reach it."""
    only(s.call is None and not s.offloaded)
    old = s.layer
    s.root = copy.deepcopy(s.root)
    old.weight.data.zero_()


@change(*ALL)
def layer_copied_shallowly(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    s.replace_layer(copy.copy(s.layer))


@change(*ALL)
def pickled_whole(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    s.root = pickle.loads(pickle.dumps(s.root))


@change(*ALL)
def saved_and_loaded_whole(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    file = io.BytesIO()
    torch.save(s.root, file)
    file.seek(0)
    s.root = torch.load(file, weights_only=False)


# -- another class, another forward, other defaults


@change("int8", "4bit")
def class_of_plain_layer(s: Subject) -> None:
    """Dequantized in place: the class of the weight stays, that of the layer does not."""
    only(s.weight.isfinite().all())  # it still has a meaning
    s.layer.weight.data = s.weight.clone()
    s.layer.__class__ = nn.Linear


@change("int8", "4bit")
def class_and_parameter_of_plain_layer(s: Subject) -> None:
    only(s.weight.isfinite().all())
    s.layer.weight = nn.Parameter(s.weight.clone(), requires_grad=False)
    s.layer.__class__ = nn.Linear


@change("int8", "4bit")
def forward_of_its_own(s: Subject) -> None:
    only(s.weight.isfinite().all())
    layer = s.layer
    layer.weight.data = s.weight.clone()
    layer.forward = lambda x: nn.functional.linear(x, layer.weight.to(x.dtype), layer.bias)


@change("int8", "4bit")
def forward_replaced(s: Subject) -> None:
    """A wrapper around the forward that was there."""
    layer = s.layer
    before = layer.forward
    layer.forward = lambda x: before(x)


@change("int8", "4bit")
def subclassed(s: Subject) -> None:
    base = type(s.layer)
    s.layer.__class__ = type("Mine", (base,), {})


@change(*ALL)
def default_dtype_bf16(s: Subject) -> None:
    torch.set_default_dtype(torch.bfloat16)


@change(*ALL)
def default_device_meta(s: Subject) -> None:
    torch.set_default_device("meta")


@change("int8", "4bit")
def bias_added(s: Subject) -> None:
    only(not s.offloaded)
    new = random(6)[:, 1].clone()
    s.layer.bias = nn.Parameter(new.clone(), requires_grad=False)
    s.bias = new


@change("int8", "4bit")
def bias_in_place(s: Subject) -> None:
    only(s.bias is not None and not s.offloaded)
    s.layer.bias.data.mul_(3)
    s.bias = s.bias * 3  # type: ignore[operator]


@change("int8")
def shape_attributes(s: Subject) -> None:
    """Half of the rows, as pruning does."""
    only(not s.adapter and s.bias is None)
    layer = s.layer
    place = owner(s)
    layer.weight.data = layer.weight.data[: ROWS // 2].contiguous()
    place.SCB = place.SCB[: ROWS // 2].contiguous()
    if layer.state.CB is not None:
        layer.state.CB = layer.weight.data
    elif layer.weight.CB is not None:
        layer.weight.CB = layer.weight.data
    layer.out_features = ROWS // 2
    s.becomes(s.weight[: ROWS // 2], s.slack)
