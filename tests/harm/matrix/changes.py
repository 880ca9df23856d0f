"""What users change about a layer, through every door that they have, and what the weight is then.

A change that gives other numbers writes the same to ``s.weight``, in plain torch.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrize

from .states import only
from .subject import COLUMNS, ROWS, Holder, Subject, plain_weight, random

INT8 = ("int8", "embedding8")
FOUR = ("4bit", "embedding4")
QUANTIZED = (*INT8, *FOUR)
ALL = ("int8", "int8-float", "4bit", "embedding4", "embedding8")


@dataclass(frozen=True)
class Change:
    name: str
    body: Callable[[Subject], None]
    families: tuple[str, ...]
    whole: bool
    """One call of the user: an error must leave the layer as it was."""
    offloaded: bool
    """Whether it means something where the weights are offloaded."""


CHANGES: dict[str, Change] = {}


def change(*families: str, whole: bool = False, offloaded: bool = False) -> Callable[..., Any]:
    def put(body: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHANGES[body.__name__] = Change(body.__name__, body, families, whole, offloaded)
        return body

    return put


@change(*ALL, offloaded=True)
def nothing(s: Subject) -> None:
    pass


# -- scales of INT8 ------------------------------------------------------------------------------


def owner(s: Subject) -> Any:
    """Where a user finds the scales: the state once the layer ran, before that the weight."""
    state = getattr(s.layer, "state", None)
    return state if state is not None and state.SCB is not None else s.layer.weight


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
    s.becomes(s.weight[order], s.slack)
    if s.bias is not None:
        s.layer.bias.data.copy_(s.layer.bias.data[order].clone())
        s.bias = s.bias[order].clone()


@change(*INT8)
def rows_permuted_in_place(s: Subject) -> None:
    order = torch.arange(ROWS - 1, -1, -1)
    s.layer.weight.data.copy_(s.layer.weight.data[order].clone())
    owner(s).SCB.copy_(owner(s).SCB[order].clone())
    s.becomes(s.weight[order], s.slack)
    if s.bias is not None:
        s.layer.bias.data.copy_(s.layer.bias.data[order].clone())
        s.bias = s.bias[order].clone()


@change("int8")
def streamed(s: Subject) -> None:
    """Codes and scales of another layer are put where forward takes them from again."""
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


# -- codes ---------------------------------------------------------------------------------------


@change(*INT8)
def codes_in_place(s: Subject) -> None:
    s.layer.weight.data.neg_()
    s.becomes(-s.weight, s.slack)


@change(*INT8)
def codes_replaced(s: Subject) -> None:
    s.layer.weight.data = -s.layer.weight.data
    s.becomes(-s.weight, s.slack)


@change("int8")
def codes_of_state_replaced(s: Subject) -> None:
    only(s.layer.state.CB is not None)
    s.layer.state.CB = -s.layer.state.CB
    s.becomes(-s.weight, s.slack)


@change(*FOUR)
def packed_in_place(s: Subject) -> None:
    layer, _ = s.donor()
    s.layer.weight.data.copy_(layer.weight.data)
    s.becomes(plain_weight(s.layer))


@change(*FOUR)
def packed_replaced(s: Subject) -> None:
    layer, _ = s.donor()
    s.layer.weight.data = layer.weight.data.clone()
    s.becomes(plain_weight(s.layer))


@change(*FOUR)
def packed_lying(s: Subject) -> None:
    s.layer.weight.data = s.layer.weight.data.reshape(1, -1)


@change("4bit")
def packed_viewed(s: Subject) -> None:
    """The same bytes under another dtype."""
    storage = torch.uint8 if s.layer.weight.dtype != torch.uint8 else torch.bfloat16
    s.layer.weight.data = s.layer.weight.data.view(-1).view(storage).view(-1, 1)


# -- statistics of 4 bits ------------------------------------------------------------------------


def statistics(name: str, write: Callable[[Any], None]) -> None:
    """A change of the quantization state; the weight is what the numbers stand for right after it."""

    def body(s: Subject) -> None:
        write(s.layer.weight.quant_state)
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
statistics("absmax_in_place", lambda q: _outer(q).absmax.mul_(2) and None)
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


# -- the weight itself ---------------------------------------------------------------------------


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
    s.layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
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
    s.layer.weight.data = s.layer.weight.data.half()


@change(*ALL)
def weight_requires_grad(s: Subject) -> None:
    s.layer.weight.requires_grad_(True)


@change(*ALL)
def weight_swapped(s: Subject) -> None:
    layer, weight = s.donor()
    torch.utils.swap_tensors(s.layer.weight, layer.weight)
    s.becomes(weight)


@change(*ALL)
def weight_set_data(s: Subject) -> None:
    layer, weight = s.donor()
    only(s.kind.family == "int8-float")
    with torch.no_grad():
        s.layer.weight.copy_(layer.weight)
    s.becomes(weight)


def fresh_weight(s: Subject) -> Any:
    """Float weights in the class of the layer's weights."""
    if s.kind.bits == 8:
        return bnb.nn.Int8Params(random(4), requires_grad=False, has_fp16_weights=s.kind.family == "int8-float")
    old, options = s.layer.weight, s.kind.options
    module = s.layer if s.kind.family == "4bit" else None
    return bnb.nn.Params4bit(random(4), requires_grad=False, quant_type=old.quant_type, module=module,
                             compress_statistics=options.get("compress_statistics", True),
                             quant_storage=options.get("quant_storage", torch.uint8))  # fmt: skip


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


# -- state dicts ---------------------------------------------------------------------------------


def loads(name: str, edit: Callable[[dict[str, Any]], dict[str, Any]] = dict, ran: bool = False,
          first: Callable[[Subject], None] | None = None, families: tuple[str, ...] = ALL, off: float = 0.0,
          **options: Any) -> None:  # fmt: skip
    """A change that loads the state dict of another layer, after ``edit``, through the model."""

    def body(s: Subject) -> None:
        only(not hasattr(s.layer, "parametrizations"))  # whose keys are others
        layer, weight = s.donor()
        if ran:
            with torch.no_grad():
                layer(s.x())
        saved = edit({key: value.clone() for key, value in layer.state_dict().items()})
        if first:
            first(s)
        before = s.held()
        try:
            s.root.load_state_dict(_whole(s, saved), **options)
        except Exception as error:
            error._changed = before != s.held()  # type: ignore[attr-defined]
            raise
        s.becomes(weight, off)
        if s.bias is not None and "bias" in saved:
            s.bias = saved["bias"].float().clone()

    body.__name__ = name
    change(*families)(body)


def _whole(s: Subject, saved: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the model: the layer's, a tied one's, and what adapters have, which stays."""
    if s.tied:
        return {f"{path}.{key}": value for path in (s.path, "head") for key, value in saved.items()}
    kept = (
        {}
        if not s.adapter
        else {key: value for key, value in s.root.state_dict().items() if not key.startswith(s.path + ".")}
    )
    return {**kept, **{f"{s.path}.{key}": value for key, value in saved.items()}}


def _cast_floats(dtype: torch.dtype) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda saved: {key: value.to(dtype) if value.is_floating_point() else value for key, value in saved.items()}


def _without(*ends: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda saved: {key: value for key, value in saved.items() if not key.endswith(ends)}


def _start_over(s: Subject) -> None:
    s.layer.weight = fresh_weight(s)


loads("loads")
loads("loads_one_that_ran", ran=True)
loads("loads_assigning", assign=True)
loads("loads_assigning_one_that_ran", ran=True, assign=True)
loads("loads_not_strictly", strict=False)
loads("loads_assigning_not_strictly", strict=False, assign=True)
loads("loads_in_half", _cast_floats(torch.float16), off=2e-3)
loads("loads_in_bf16", _cast_floats(torch.bfloat16), off=1e-2)
loads("loads_in_half_not_strictly", _cast_floats(torch.float16), off=2e-3, strict=False)
loads("loads_in_half_assigning", _cast_floats(torch.float16), off=2e-3, assign=True)
loads("loads_in_double", _cast_floats(torch.float64))
loads("loads_without_scales", _without("SCB"), families=("int8",))
loads("loads_without_scales_not_strictly", _without("SCB"), families=("int8",), strict=False)
loads("loads_without_format", _without("weight_format"), families=("int8",))
loads("loads_without_statistics", _without("absmax", "quant_map", "nf4", "fp4"), families=("4bit",))
loads("loads_without_statistics_not_strictly", _without("absmax", "quant_map", "nf4", "fp4"), families=("4bit",),
      strict=False)  # fmt: skip
loads("loads_without_packed_state", _without("nf4", "fp4"), families=("4bit",), strict=False)
loads("loads_with_parameters", lambda saved: {k: nn.Parameter(v, False) for k, v in saved.items()}, families=QUANTIZED)
loads("loads_into_fresh", first=_start_over)
loads("loads_into_fresh_not_strictly", first=_start_over, strict=False)
loads("loads_into_fresh_assigning", first=_start_over, assign=True)


def loads_floats(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    def body(s: Subject) -> None:
        saved: dict[str, Any] = {"weight": random(4).to(dtype)}
        if s.bias is not None:
            saved["bias"] = s.bias.clone()
        s.root.load_state_dict(_whole(s, saved), **options)
        s.becomes(random(4), s.kind.requantized)

    body.__name__ = name
    change(*ALL, whole=True)(body)


loads_floats("loads_floats")
loads_floats("loads_floats_in_half", torch.float16)
loads_floats("loads_floats_assigning", assign=True)
loads_floats("loads_floats_not_strictly", strict=False)


@change(*ALL)
def loads_floats_and_moves(s: Subject) -> None:
    CHANGES["loads_floats_assigning"].body(s)
    s.root.to("cpu")


@change("4bit", whole=True)
def loads_another_storage(s: Subject) -> None:
    storage = torch.bfloat16 if s.kind.options["quant_storage"] is not torch.bfloat16 else torch.uint8
    layer = s.kind.fresh(3, quant_storage=storage).to("cpu")
    weight = plain_weight(layer)
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    s.layer.load_state_dict(saved)
    s.becomes(weight)
    s.bias = None if s.bias is None else layer.bias.detach().clone()


@change("4bit", whole=True)
def loads_other_type(s: Subject) -> None:
    """A checkpoint of the other 4-bit type, or nested where the layer is not."""
    other = "fp4" if s.kind.options["quant_type"] == "nf4" else "nf4"
    layer = s.kind.fresh(3, quant_type=other).to("cpu")
    weight = plain_weight(layer)
    s.layer.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
    s.becomes(weight)
    s.bias = None if s.bias is None else layer.bias.detach().clone()


@change("4bit", whole=True)
def loads_other_nesting(s: Subject) -> None:
    layer = s.kind.fresh(3, compress_statistics=not s.kind.options["compress_statistics"]).to("cpu")
    weight = plain_weight(layer)
    s.layer.load_state_dict({key: value.clone() for key, value in layer.state_dict().items()})
    s.becomes(weight)
    s.bias = None if s.bias is None else layer.bias.detach().clone()


@change(*ALL)
def loads_own(s: Subject) -> None:
    s.root.load_state_dict({key: value.clone() for key, value in s.root.state_dict().items()})


@change(*ALL)
def loads_own_live(s: Subject) -> None:
    """Its own tensors, not copies."""
    s.root.load_state_dict(s.root.state_dict())


@change(*ALL)
def loads_own_assigning(s: Subject) -> None:
    s.root.load_state_dict(s.root.state_dict(), assign=True)


@change(*ALL)
def loads_on_meta(s: Subject) -> None:
    """The layer is made anew on meta under another default dtype, and loaded by assigning."""
    only(not s.adapter and not s.tied and not s.offloaded)
    layer, weight = s.donor()
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        layer = s.kind.fresh()
    layer.load_state_dict(saved, assign=True)
    s.replace_layer(layer)
    s.becomes(weight)
    if s.bias is not None:
        s.bias = saved["bias"].float().clone()


@change(*ALL)
def loads_partly(s: Subject) -> None:
    """One file holds the weight and another the rest, as in shards."""
    layer, weight = s.donor()
    saved = {f"{s.path}.{k}": v.clone() for k, v in layer.state_dict().items()}
    weights = {k: v for k, v in saved.items() if k.endswith("weight")}
    s.root.load_state_dict(weights, strict=False)
    s.root.load_state_dict({k: v for k, v in saved.items() if k not in weights}, strict=False)
    s.becomes(weight)
    if s.bias is not None:
        s.bias = layer.bias.detach().float().clone()


# -- calls with other parameters -----------------------------------------------------------------


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
        layer, weight = s.donor()
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
    layer, weight = s.donor()
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


# -- casts, moves, copies of the whole -----------------------------------------------------------


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


# -- another class, another forward, other defaults ----------------------------------------------


@change("int8", "4bit")
def class_of_plain_layer(s: Subject) -> None:
    """Dequantized in place: the class of the weight stays, that of the layer does not."""
    s.layer.weight.data = s.weight.clone()
    s.layer.__class__ = nn.Linear


@change("int8", "4bit")
def class_and_parameter_of_plain_layer(s: Subject) -> None:
    s.layer.weight = nn.Parameter(s.weight.clone(), requires_grad=False)
    s.layer.__class__ = nn.Linear


@change("int8", "4bit")
def forward_of_its_own(s: Subject) -> None:
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


@change("int8", "4bit")
def shape_attributes(s: Subject) -> None:
    """Half of the rows, as pruning does."""
    only(s.kind.family == "int8" and not s.adapter and s.bias is None)
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


__all__ = ["CHANGES", "COLUMNS", "Change"]
