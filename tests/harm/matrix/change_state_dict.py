"""State dicts that are loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


from .doors import ALL, CHANGES, FLOATS, QUANTIZED, change, fresh_weight
from .states import only
from .subject import Subject, plain_weight, random


# -- state dicts


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
        s.becomes(weight, off + _rounding(s))
        if s.bias is not None and "bias" in saved:
            s.bias = saved["bias"].float().clone()

    body.__name__ = name
    change(*families)(body)


def _rounding(s: Subject) -> float:
    """Of values that are copied into a weight which is in half precision and not packed."""
    dtype = s.layer.weight.dtype
    return torch.finfo(dtype).eps if s.kind.family in FLOATS and dtype in (torch.float16, torch.bfloat16) else 0.0


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
        only(options.get("strict", True) or not hasattr(s.layer, "parametrizations"))  # nothing would be loaded
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
    only(not hasattr(s.layer, "parametrizations"))  # whose keys are others: nothing would be loaded
    layer, weight = s.donor()
    saved = {f"{s.path}.{k}": v.clone() for k, v in layer.state_dict().items()}
    weights = {k: v for k, v in saved.items() if k.endswith("weight")}
    s.root.load_state_dict(weights, strict=False)
    s.root.load_state_dict({k: v for k, v in saved.items() if k not in weights}, strict=False)
    s.becomes(weight)
    if s.bias is not None:
        s.bias = layer.bias.detach().float().clone()
