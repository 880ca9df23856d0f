"""Finding the row scales of an INT8 layer, and naming the layer that lost them.

A weight *settles* in its layer at the first forward: see :mod:`.scale_ownership`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...process import call_stack, live_objects
from .. import accelerate_hooks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


PLACES = frozenset({"CB", "SCB"})
MARKS = PLACES | {"has_fp16_weights"}
"""Attributes by which a plain ``Parameter`` is known as an INT8 weight that was pickled."""


def get_scales(weight: Any) -> Tensor | None:
    """Return the row scales of ``weight``, its own or those of its layer; None if there are none."""
    scale: Tensor | None = getattr(weight, "SCB", None)
    return scale


def has_scales(weight: Any) -> bool:
    """Tell whether ``weight`` has an attribute for row scales, be it None: a plain tensor has not."""
    return hasattr(weight, "SCB")


def is_unsettled(weight: Any) -> bool:
    """Tell whether ``weight`` owns its packed weights and scales: its layer has not run with it."""
    return getattr(weight, "CB", None) is not None


def is_settled(weight: Any) -> bool:
    """Tell whether ``weight`` holds packed INT8 weights that the state of its layer owns, with their scales."""
    return is_int8(weight) and has_scales(weight) and not is_unsettled(weight)


def current_scales(weight: Any, state: Any) -> Any:
    """Return the row scales of ``weight``: its own if its layer has run with another weight; else the ones in ``state``.

    Before a first forward peft itself gives the state scales, and users write there.
    """
    is_new = is_unsettled(weight) and state.CB is not None and not is_lost(get_scales(weight))
    return get_scales(weight) if is_new else state.SCB


def pair_of_product(state: Any) -> tuple[Any, Any]:
    """Return the packed weights and scales that a product with ``state`` computes with; None where it has none yet."""
    return state.CB, state.SCB


read_pair: Callable[[Any], tuple[Any, Any]] = operator.attrgetter("CB", "SCB")
"""Return :func:`pair_of_product` by code in C, for what each layer calls in eager; not every Dynamo can trace it."""


def held_tensors(*owners: Any) -> list[Any]:
    """Return scales and packed weights, None where there are none, of each of ``owners``: weights and states."""
    return [getattr(owner, name, None) for owner in owners for name in ("SCB", "CB")]


def places_of_scales(layer: Any) -> Iterator[tuple[Any, str]]:
    """Yield the places of the row scales of ``layer``: its weight or its state, and the attribute."""
    for holder in (layer.weight, getattr(layer, "state", None)):
        if get_scales(holder) is not None:
            yield holder, "SCB"


def make_state(layer: Any, packed: Tensor | None = None, scale: Tensor | None = None) -> Any:
    """Return a state for one product of ``layer`` with ``packed`` and ``scale``, which is then thrown away."""
    import bitsandbytes as bnb

    state, kept = bnb.MatmulLtState(), layer.state
    state.CB, state.SCB = packed, scale
    state.threshold, state.has_fp16_weights, state.is_training = kept.threshold, kept.has_fp16_weights, layer.training
    return state


def set_weight_and_scales(weight: Any, packed: Tensor | None, scale: Tensor | None) -> None:
    """Give ``weight`` packed weights and row scales; without ``packed`` its layer does not take it for a new weight."""
    weight.CB, weight.SCB = packed, scale


def take_packed_weight_of_data(weight: Any) -> None:
    """Let ``weight.CB`` be the data of a ``weight`` that has not settled, as ``weight.to(weight.device)`` would."""
    import torch

    if torch.compiler.is_compiling() or not isinstance(weight, torch.Tensor):
        return
    if weight.dtype != torch.int8 or weight.is_meta:  # is_int8() written out: each forward of a DoRA layer comes by
        return
    packed = vars(weight).get("CB")
    if packed is not None and packed.data_ptr() != weight.data_ptr():
        vars(weight)["CB"] = weight.data


def is_lost(scale: Tensor | None) -> bool:
    """Tell whether ``scale`` holds no values: absent, or on the meta device."""
    return scale is None or scale.device.type == "meta"


def restore_missing_scales(layer: Any) -> None:
    """Give the weight of ``layer`` its row scales, if it has none, from where they are."""
    if get_scales(layer.weight) is None:
        layer.weight.SCB = find_scales(layer)


def is_int8(weight: Any) -> bool:
    import torch

    return isinstance(weight, torch.Tensor) and weight.dtype == torch.int8


def find_scales(layer: Any) -> Tensor | None:
    """Return the row scales (float, one for each output feature) of a layer's int8 weight, or None if they are lost.

    They are looked for in the weight; the offloaded tensors of accelerate; the layer's state, if its packed weights equal
    the weight's. They are never computed: packed weights do not tell their scale.
    """
    weight, state = layer.weight, layer.state
    for scale in itertools.chain((get_scales(weight),), _offloaded(layer)):
        if scale is not None and not is_lost(scale):
            return scale.to(weight.device)
    if is_lost(state.SCB) or is_lost(state.CB) or state.CB is getattr(weight, "CB", None):
        return None  # in the last case the state has taken the packed weights over, and no scales
    same = state.CB.shape == weight.shape and bool((state.CB.to(weight.device) == weight.data).all())
    return state.SCB.to(weight.device) if same else None


def _offloaded(layer: Module) -> Iterator[Tensor | None]:
    """Yield the scales that accelerate's hooks hold for ``layer``: an entry of their own, or on the offloaded weight."""
    for part in accelerate_hooks.hooks_on(layer):
        weights = getattr(part, "weights_map", None)
        if weights is None:
            continue
        yield _entry(weights, "SCB")
        yield get_scales(_entry(weights, "weight"))


def _entry(weights: Any, name: str) -> Tensor | None:
    """Return the entry ``name`` of a map that may read it from the disk, or None."""
    try:
        found: Tensor = weights[name]
    except KeyError:
        return None
    return found


def known_scales(layer: Any) -> Any:
    """Return the row scales of the weight or state of ``layer`` without a look at contents, as a compiler needs it."""
    scale = get_scales(layer.weight)
    return layer.state.SCB if scale is None else scale


def scales_to_save(layer: Any) -> Tensor | None:
    """Return the row scales that ``state_dict`` saves of ``layer``; None if it is not quantized."""
    scale: Tensor | None = None if layer.state.has_fp16_weights else known_scales(layer)
    return scale


def require_scales(layer: Any) -> Tensor:
    """Return :func:`find_scales` of ``layer``; raise an error that names the layer if they are lost."""
    found = find_scales(layer)
    if found is None:
        raise make_lost_error(layer)
    return found


def make_lost_error(layer: Any) -> RuntimeError:
    """Return the error for an int8 weight without its scales; ``layer`` is None if it is unknown."""
    which = "a weight" if layer is None else f"{type(layer).__name__} {name_of(layer)!r}"
    return RuntimeError(
        f"{which} has a packed INT8 weight without its row scales (SCB), which cannot be computed from it. "
        "Load the weight together with the 'SCB' entry of its checkpoint (Int8Params(codes, SCB=scales), or "
        "load_state_dict into a quantized layer), or quantize the layer again from its original weights."
    )


def name_of(layer: Module) -> str:
    """Return the dotted name of ``layer`` in the outermost module that holds it. Slow: for error messages."""
    if found_on_stack := call_stack.name_of(layer):
        return found_on_stack
    module = layer
    keys: list[str] = []
    while len(keys) < 100 and (found := _parent(module)):
        module, key = found
        keys.append(key)
    return ".".join(reversed(keys)) or repr(layer)


def _parent(module: Module) -> tuple[Module, str] | None:
    """Return a module that has ``module`` among its children, and the name of the child."""
    for parent in live_objects.find_holders(module, depth=1):
        for key, child in (vars(parent).get("_modules") or {}).items():
            if child is module:
                return parent, key
    return None


def layer_of(state: Any) -> Any:
    """Return the layer whose ``MatmulLtState`` is ``state``, or None. Slow: for error messages."""
    return next((m for m in live_objects.find_holders(state, depth=1) if vars(m).get("state") is state), None)
