"""How a change is declared, and what several share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch


from .states import only
from .subject import Subject, random

INT8 = ("int8", "embedding8", "own8")
FOUR = ("4bit", "embedding4", "own4")
QUANTIZED = (*INT8, *FOUR)
FLOATS = ("int8-float", "float", "stable")
ALL = (*QUANTIZED, *FLOATS)


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


def owner(s: Subject) -> Any:
    """Where a user finds the scales: the state once the layer ran, before that the weight."""
    weight, state = s.layer.weight, getattr(s.layer, "state", None)
    only(weight.is_meta or bool((weight == weight.round()).all()))  # numbers of their own have no scales
    return state if state is not None and state.SCB is not None else s.layer.weight


def stored(s: Subject) -> None:
    """Only where the weight is what the layer stores: a pruned or parametrized one is another tensor after the next forward."""
    only(not hasattr(s.layer, "parametrizations") and not hasattr(s.layer, "weight_orig"))


def fresh_weight(s: Subject) -> Any:
    """Float weights in the class of the layer's weights."""
    if s.kind.bits == 32:
        return torch.nn.Parameter(random(4), requires_grad=False)
    if s.kind.bits == 8:
        return bnb.nn.Int8Params(random(4), requires_grad=False, has_fp16_weights=s.kind.family == "int8-float")
    old, options = s.layer.weight, s.kind.options
    module = s.layer if s.kind.family == "4bit" else None
    return bnb.nn.Params4bit(random(4), requires_grad=False, quant_type=old.quant_type, module=module,
                             compress_statistics=options.get("compress_statistics", True),
                             quant_storage=options.get("quant_storage", torch.uint8))  # fmt: skip
