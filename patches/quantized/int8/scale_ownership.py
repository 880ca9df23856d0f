"""Who owns the row scales of an INT8 weight: the weight until its layer has run, the state of the layer from then on.

The first forward of a ``Linear8bitLt`` moves packed weights and scales into ``layer.state``, and from then on computes
with what is there. ``weight.SCB`` is None from then on, and a holder of the weight alone (a copy, a pickle, a hook that
moves it) loses the scales. A second reference on the weight would go wrong as soon as someone replaces ``state.SCB``.
So there is none: ``Int8Params.SCB`` becomes a view of the scales of the layer that the weight has settled in, while it
is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine import SetAttribute
from ...process import call_stack, live_objects, tracing
from ...process.tensor_bits import have_same_bits
from .. import saved_for_backward
from . import row_scales

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class _Home(NamedTuple):
    """Where a weight has settled, and with which packed weights and scales."""

    layer: weakref.ref[Module]
    address: int
    scale: weakref.ref[Tensor] | None


_homes: dict[int, _Home] = {}
"""By ``id()`` of the weight, true while that layer has it: ``torch.utils.swap_tensors`` refuses weakly referenced tensors."""
_most = 256

_noted: weakref.WeakKeyDictionary[Module, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""Codes and scales of the weight of a layer that has not run yet: ``functional_call`` takes the weight itself away."""


def record_first_forward(layer: Any) -> None:
    """The packed weights and scales of the weight of ``layer`` are in its state: from now on the weight shows those."""
    import torch

    if torch.compiler.is_compiling():
        return
    weight, state = layer._parameters.get("weight"), layer.state
    if weight is not None and state.CB is not None:
        if len(_homes) >= _most:
            _forget_stale()
        scale = None if state.SCB is None else weakref.ref(state.SCB)
        _homes[id(weight)] = _Home(weakref.ref(layer), state.CB.data_ptr(), scale)


def _forget_stale() -> None:
    global _most
    for key, home in [*_homes.items()]:
        layer = home.layer()
        if layer is None or id(layer._parameters.get("weight")) != key:
            _homes.pop(key, None)
    _most = max(256, 2 * len(_homes))


def _state_of(weight: Any) -> Any:
    """The state that owns the packed weights and scales of ``weight``; None if it has not settled, or left its
    layer."""
    home = _homes.get(id(weight))
    layer: Any = None if home is None else home.layer()
    if layer is None or vars(weight).get("CB") is not None or layer._parameters.get("weight") is not weight:
        return None
    state = layer.state
    return state if state.CB is not None and state.CB.data_ptr() == weight.data_ptr() else None


def was_quantized(weight: Any) -> bool:
    """Tell whether ``weight`` holds or had packed weights: it keeps them or their scales, or has settled."""
    own = vars(weight)
    return own.get("CB") is not None or own.get("SCB") is not None or layer_settled_in(weight) is not None


def layer_settled_in(weight: Any) -> Any:
    """The layer in which ``weight`` has settled, while it is there; else None."""
    home = _homes.get(id(weight))
    layer: Any = None if home is None else home.layer()
    return None if layer is None or layer._parameters.get("weight") is not weight else layer


def is_foreign(module: Any) -> bool:
    """Tell whether ``module`` is a layer of torch (by now), which multiplies by its weight as it is.

    A module with a forward of its user's may read packed weights and scales of its weight: it is quantized as before.
    """
    from bitsandbytes.nn import Embedding8bit, Linear8bitLt

    if isinstance(module, (Linear8bitLt, Embedding8bit)):
        return False
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.")


def has_other_forward(module: Any) -> bool:
    """Tell whether a user gave ``module`` a forward."""
    own = vars(module)
    forward = own.get("_old_forward", own.get("forward"))  # the first is what accelerate's hooks call
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def modules_of(weight: Any) -> list[Any]:
    """The modules whose weight ``weight`` is; none for one that was made just now, and is not in its module yet.

    Slow for one in a layer of torch that has not settled and is not noted: ask only of floats that were quantized.
    """
    if (layer := layer_settled_in(weight)) is not None:
        return [layer]
    if (mover := call_stack.mover_of(weight)) is not None and not is_foreign(mover):
        return [mover]
    noted = [layer for layer in [*_noted] if layer._parameters.get("weight") is weight]
    return noted or [m for m in live_objects.find_holders(weight, depth=1) if m._parameters.get("weight") is weight]


class Scales:
    """``Int8Params.SCB``. No property: Dynamo would trace into it, and cannot; this it asks for its value."""

    def __get__(self, weight: Any, owner: Any = None) -> Any:
        if weight is None:
            return self
        own = vars(weight)
        if "SCB" not in own:
            raise AttributeError(f"{type(weight).__name__!r} object has no attribute 'SCB'")
        scale = own["SCB"]
        if scale is None and (state := _state_of(weight)) is not None:
            scale = state.SCB
        return scale

    def __set__(self, weight: Any, scale: Tensor | None) -> None:
        own = vars(weight)
        if scale is not None and (state := _state_of(weight)) is not None:
            own["SCB"], state.SCB = None, scale
            return
        old, own["SCB"] = own.get("SCB"), scale
        if old is not None and old is not scale:
            for layer, (_, noted) in [*_noted.items()]:
                if noted() is old:
                    _noted.pop(layer, None)

    def __delete__(self, weight: Any) -> None:
        if "SCB" not in vars(weight):
            raise AttributeError("SCB")
        del vars(weight)["SCB"]


def make_scales(original: Any) -> Scales:
    """What ``Int8Params.SCB`` becomes: one object, however often it is applied."""
    return _scales()


@cache
def _scales() -> Scales:
    # A graph reads the scales among its inputs, and Dynamo compiles the frames that this takes, too.
    if tracing.never_compile_code(Scales.__get__.__code__):
        return Scales()
    namespace = {"__doc__": Scales.__doc__, "__get__": tracing.never_compile(Scales.__get__)}
    untraced: Scales = type("Scales", (Scales,), namespace)()
    return untraced


SCALES_OF_THE_LAYER = SetAttribute("bitsandbytes.nn.modules:Int8Params.SCB", make=make_scales)


def make_setstate(original: Callable[..., None] | None) -> Callable[..., None]:
    """``Linear8bitLt.__setstate__``: a copy, and a layer from a pickle, has its scales in one place as well."""
    from bitsandbytes.nn.modules import Linear8bitLt

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        load = super(Linear8bitLt, self).__setstate__ if original is None else partial(original, self)
        load(state)
        settle_again(self)
        record_original(self)

    return __setstate__


def settle_again(layer: Any) -> None:
    """Let the weight of a ``layer`` that has run, and was copied or put together anew, show the scales of its state."""
    weight, state = layer._parameters.get("weight"), vars(layer).get("state")
    own = {} if weight is None else vars(weight)
    if state is None or state.CB is None or state.SCB is None or "SCB" not in own or own.get("CB") is not None:
        return
    if own["SCB"] is None or own["SCB"] is state.SCB:
        own["SCB"] = None
        if weight.data_ptr() != state.CB.data_ptr() and have_same_bits(weight, state.CB):
            weight.data = state.CB  # as the next forward does
        record_first_forward(layer)


def on_weight_assigned(layer: Any, weight: Any) -> None:
    """``weight`` was assigned to ``layer``, which has run: a copy of what the state owns, a new one, or one without scales."""
    state = layer.state
    if not row_scales.is_settled(weight) or state.CB is None:
        return
    if (scale := vars(weight).get("SCB")) is not None:
        if state.SCB is not None and have_same_bits(scale, state.SCB) and have_same_bits(weight, state.CB):
            vars(weight)["SCB"], weight.data = None, state.CB  # as the next forward does
            record_first_forward(layer)
        else:
            weight.CB = weight.data
    elif state.SCB is not None:
        _homes[id(weight)] = _Home(weakref.ref(layer), 0, weakref.ref(state.SCB))


def packed_weight_to_settle(layer: Any) -> Tensor | None:
    """The packed weights that ``layer`` settles with. Called while its state still has the old ones, which tell whose
    scales it has."""
    import torch

    saved_for_backward.record_onloaded_weight(layer)
    weight = layer.weight
    if weight.SCB is None and not torch.compiler.is_compiling():
        row_scales.complete_scales(layer)
    codes: Tensor | None = weight.CB
    return codes


def check_weight_matches_state(layer: Any) -> None:
    """Before packed weights and scales of a ``layer`` that has run are saved or merged: let its weight hold the packed
    weights that it computes with.

    Raises if weight and state hold different packed weights, and nothing tells which of them the scales are for.
    """
    weight, state = layer._parameters.get("weight"), layer.state
    if not row_scales.is_settled(weight) or state.CB is None or weight.is_meta or state.CB.is_meta:
        return
    if weight.dtype != state.CB.dtype:
        return
    if weight.data_ptr() == state.CB.data_ptr() or have_same_bits(weight, state.CB):
        if state.SCB is not None:
            vars(weight)["SCB"] = None  # forward uses the state's, and so does a reader of the weight
            record_first_forward(layer)
        return
    home = _homes.get(id(weight))
    settled_in: Any = None if home is None else home.layer()
    if home is None or settled_in is not layer or vars(weight).get("SCB") is not None:
        return  # the owner is unknown, or it has scales of its own
    if home.address == weight.data_ptr():  # others were given to the state: as the next forward does
        weight.data = state.CB
    elif home.address != state.CB.data_ptr() or home.scale is None or home.scale() is state.SCB:
        raise RuntimeError(
            f"{type(layer).__name__} {row_scales.name_of(layer)!r} holds two different packed INT8 weights: layer.weight, and "
            "layer.state.CB, which forward uses. The row scales (layer.state.SCB) fit only one of the two. "
            "Replace packed weight and scales together: layer.weight = Int8Params(codes, requires_grad=False, CB=codes, "
            "SCB=scales), or load_state_dict with 'weight' and 'SCB'"
        )


def on_state_dict_loaded(layer: Any) -> None:
    """Codes were loaded into the weight of ``layer``: if it has run, it computes with those from now on."""
    weight, state = layer.weight, layer.state
    if row_scales.is_settled(weight) and state.CB is not None and state.CB.data_ptr() != weight.data_ptr():
        state.CB = weight.data
        record_first_forward(layer)


def clear_state(layer: Any) -> None:
    """``layer`` got a weight that owns its packed weights and scales: its state holds tensors of another weight, which
    no weight owns by now."""
    layer.state.CB = layer.state.SCB = None


def own_packed_weight_and(scale: Tensor | None, layer: Any) -> None:
    """Let the weight of ``layer`` own its packed weights and ``scale``; without one, forward raises an error."""
    row_scales.set_weight_and_scales(layer.weight, layer.weight.data, scale)
    clear_state(layer)
    _noted.pop(layer, None)


def record_original(layer: Any) -> None:
    """Note packed weights and scales of a weight that ``layer`` has got and not run with yet."""
    weight = layer._parameters.get("weight")
    codes, scale = getattr(weight, "CB", None), getattr(weight, "SCB", None)
    if codes is not None and scale is not None:
        _noted[layer] = weakref.ref(codes), weakref.ref(scale)


def original_weight_and_scales(layer: Any) -> tuple[Tensor, Tensor] | None:
    """The packed weights that ``layer`` was quantized to, and their scales, whatever stands in the place of its weight
    now."""
    import torch

    state = layer.state
    codes, scale = state.CB, state.SCB
    if not torch.compiler.is_dynamo_compiling() and (noted := _noted.get(layer)) is not None:
        others = noted[0](), noted[1]()
        if others[0] is not None and others[0] is not codes:
            codes, scale = others
    if codes is None or scale is None or codes.is_meta or scale.is_meta:
        return None
    return codes, scale
