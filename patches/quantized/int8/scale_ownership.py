"""Who owns the row scales of an INT8 weight: the weight until its layer has run, the state of the layer from then on.

The first forward of a ``Linear8bitLt`` moves packed weights and scales into ``layer.state``, and each forward computes with
these: the weight has *settled* in the layer. bitsandbytes sets ``weight.SCB`` to None then, and a program that has the weight
alone (a copy, a pickle, a hook that moves it) loses the scales. A second reference on the weight would be wrong as soon as
someone replaces ``state.SCB``. So ``Int8Params.SCB`` becomes a view: it shows the scales of the layer that the weight has
settled in, while the layer has that weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine import SetAttribute
from ...process import call_stack, live_objects, tracing
from ...process.tensor_bits import have_same_bits
from .. import saved_for_backward
from . import row_scales

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class _Ownership(NamedTuple):
    """The layer in which a weight has settled, and the packed weights and scales of its state at that time."""

    layer: weakref.ref[Module]
    packed_address: int
    scale: weakref.ref[Tensor] | None


_ownerships: dict[int, _Ownership] = {}
"""By ``id(weight)``, because ``torch.utils.swap_tensors`` refuses weakly referenced tensors; valid while the layer has it."""
_purge_at = 256
_NO_ADDRESS = 0  # the weight was assigned to the layer: it was never in the state

_before_first_forward: weakref.WeakKeyDictionary[Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""Weak references to packed weights and scales of layers that have not run: ``functional_call`` replaces the weight."""


def record_first_forward(layer: Any) -> None:
    """Note that the weight of ``layer`` has settled: its packed weights and scales are in the state of ``layer``."""
    import torch

    if torch.compiler.is_compiling():
        return
    weight, state = layer._parameters.get("weight"), layer.state
    if weight is not None and state.CB is not None:
        if len(_ownerships) >= _purge_at:
            _forget_stale_ownerships()
        scale = None if state.SCB is None else weakref.ref(state.SCB)
        _ownerships[id(weight)] = _Ownership(weakref.ref(layer), state.CB.data_ptr(), scale)


def _forget_stale_ownerships() -> None:
    global _purge_at
    for key, ownership in [*_ownerships.items()]:
        layer = ownership.layer()
        if layer is None or id(layer._parameters.get("weight")) != key:
            _ownerships.pop(key, None)
    _purge_at = max(256, 2 * len(_ownerships))


def owning_layer(weight: Any) -> Any:
    """Return the layer in which ``weight`` has settled, if the layer still has it; else None."""
    ownership = _ownerships.get(id(weight))
    layer: Any = None if ownership is None else ownership.layer()
    return None if layer is None or layer._parameters.get("weight") is not weight else layer


def _owning_state(weight: Any) -> Any:
    """Return the state that owns the packed weights and scales of ``weight``; None if the weight owns them."""
    layer = owning_layer(weight)
    if layer is None or vars(weight).get("CB") is not None:
        return None
    state = layer.state
    return state if state.CB is not None and state.CB.data_ptr() == weight.data_ptr() else None


def was_quantized(weight: Any) -> bool:
    """Tell whether ``weight`` holds or had packed weights: it has an attribute of them, or has settled."""
    attributes = vars(weight)
    return attributes.get("CB") is not None or attributes.get("SCB") is not None or owning_layer(weight) is not None


def is_torch_layer(module: Any) -> bool:
    """Tell whether ``module`` is a layer of torch, which multiplies by its weight as it is.

    False for a module with a forward of its user, which may read packed weights and scales.
    """
    from bitsandbytes.nn import Embedding8bit, Linear8bitLt

    if isinstance(module, (Linear8bitLt, Embedding8bit)):
        return False
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.")


def has_custom_forward(module: Any) -> bool:
    """Tell whether a user gave ``module`` a forward."""
    attributes = vars(module)
    forward = attributes.get("_old_forward", attributes.get("forward"))  # the first is what accelerate's hooks call
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def modules_of(weight: Any) -> list[Any]:
    """Return the modules that have ``weight``: none if it was just made, and is not in its module yet.

    It walks over live objects if the weight is not recorded: call it for dequantized weights alone.
    """
    if (layer := owning_layer(weight)) is not None:
        return [layer]
    if (mover := call_stack.mover_of(weight)) is not None and not is_torch_layer(mover):
        return [mover]
    noted = [layer for layer in [*_before_first_forward] if layer._parameters.get("weight") is weight]
    return noted or [m for m in live_objects.find_holders(weight, depth=1) if m._parameters.get("weight") is weight]


class Scales:
    """The descriptor ``Int8Params.SCB``. Dynamo cannot trace a property here; of this class it takes the value."""

    def __get__(self, weight: Any, owner: Any = None) -> Any:
        if weight is None:
            return self
        attributes = vars(weight)
        if "SCB" not in attributes:
            raise AttributeError(f"{type(weight).__name__!r} object has no attribute 'SCB'")
        scale = attributes["SCB"]
        if scale is None and (state := _owning_state(weight)) is not None:
            scale = state.SCB
        return scale

    def __set__(self, weight: Any, scale: Tensor | None) -> None:
        attributes = vars(weight)
        if scale is not None and (state := _owning_state(weight)) is not None:
            attributes["SCB"], state.SCB = None, scale
            return
        old, attributes["SCB"] = attributes.get("SCB"), scale
        if old is not None and old is not scale:
            for layer, (_, noted) in [*_before_first_forward.items()]:
                if noted() is old:
                    _before_first_forward.pop(layer, None)

    def __delete__(self, weight: Any) -> None:
        if "SCB" not in vars(weight):
            raise AttributeError("SCB")
        del vars(weight)["SCB"]


def make_scales(original: Any) -> Scales:
    """Return the value of ``Int8Params.SCB``: one object, however often it is applied."""
    return _scales()


@cache
def _scales() -> Scales:
    # A graph takes the scales as an input. Dynamo would compile the frames that fetch it, too: not these.
    if tracing.never_compile_code(Scales.__get__.__code__):
        return Scales()
    namespace = {"__doc__": Scales.__doc__, "__get__": tracing.never_compile(Scales.__get__)}
    untraced: Scales = type("Scales", (Scales,), namespace)()
    return untraced


SCALES_OF_THE_LAYER = SetAttribute("bitsandbytes.nn.modules:Int8Params.SCB", make=make_scales)


def load_pickled(layer: Any, inherited: Callable[..., None], pickled: dict[str, Any]) -> None:
    """Run ``__setstate__`` of ``layer``, a copy or from a pickle, and let its scales be in one place, too."""
    inherited(pickled)
    show_scales_of_state(layer)
    record_original(layer)


def show_scales_of_state(layer: Any) -> None:
    """Let the weight of ``layer``, which has run and was copied or moved, show the scales of its state again."""
    weight, state = layer._parameters.get("weight"), vars(layer).get("state")
    attributes = {} if weight is None else vars(weight)
    if (
        state is None
        or state.CB is None
        or state.SCB is None
        or "SCB" not in attributes
        or attributes.get("CB") is not None
    ):
        return
    if attributes["SCB"] is None or attributes["SCB"] is state.SCB:
        attributes["SCB"] = None
        if weight.data_ptr() != state.CB.data_ptr() and have_same_bits(weight, state.CB):
            weight.data = state.CB  # as the next forward does
        record_first_forward(layer)


def on_weight_assigned(layer: Any, weight: Any) -> None:
    """Decide who owns the scales after ``weight`` was assigned to ``layer``, which has run.

    For a copy of the weight that the layer computes with, and for one without scales, the state; else the new weight.
    """
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
        _ownerships[id(weight)] = _Ownership(weakref.ref(layer), _NO_ADDRESS, weakref.ref(state.SCB))


def packed_weight_to_settle(layer: Any) -> Tensor | None:
    """Return the packed weight that forward puts into the state of ``layer``; first restore missing scales from the old one."""
    import torch

    saved_for_backward.record_onloaded_weight(layer)
    weight = layer.weight
    if weight.SCB is None and not torch.compiler.is_compiling():
        row_scales.restore_missing_scales(layer)
    packed: Tensor | None = weight.CB
    return packed


def sync_weight_with_state(layer: Any) -> None:
    """Let the weight of ``layer``, which is saved or merged, hold the packed weights of its state, as forward would.

    Raise ``RuntimeError`` if they differ and it cannot be told which of the two the scales belong to. The one that was
    replaced since the first forward is newer, and the scales belong to it if they were replaced as well.
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
    if owning_layer(weight) is not layer or vars(weight).get("SCB") is not None:
        return  # the owner is unknown, or the weight has scales of its own
    _, packed_address, scale = _ownerships[id(weight)]
    weight_replaced, state_replaced = packed_address != weight.data_ptr(), packed_address != state.CB.data_ptr()
    scales_replaced = scale is not None and scale() is not state.SCB
    if not weight_replaced:
        weight.data = state.CB
    elif state_replaced or not scales_replaced:
        raise RuntimeError(
            f"{type(layer).__name__} {row_scales.name_of(layer)!r} holds two different packed INT8 weights: layer.weight, and "
            "layer.state.CB, which forward uses. The row scales (layer.state.SCB) fit only one of the two. "
            "Replace packed weight and scales together: layer.weight = Int8Params(codes, requires_grad=False, CB=codes, "
            "SCB=scales), or load_state_dict with 'weight' and 'SCB'"
        )


def on_state_dict_loaded(layer: Any) -> None:
    """Let ``layer`` compute with the packed weights that were loaded into its weight, also if it has run."""
    weight, state = layer.weight, layer.state
    if row_scales.is_settled(weight) and state.CB is not None and state.CB.data_ptr() != weight.data_ptr():
        state.CB = weight.data
        record_first_forward(layer)


def clear_state(layer: Any) -> None:
    """Empty the state of ``layer``, which got a weight that owns its packed weights and scales."""
    layer.state.CB = layer.state.SCB = None


def give_ownership_to_weight(scale: Tensor | None, layer: Any) -> None:
    """Let the weight of ``layer`` own its packed weights and ``scale``; with None, forward raises an error."""
    row_scales.set_weight_and_scales(layer.weight, layer.weight.data, scale)
    clear_state(layer)
    _before_first_forward.pop(layer, None)


def record_original(layer: Any) -> None:
    """Note the packed weights and scales of a weight that ``layer`` has not run with yet."""
    weight = layer._parameters.get("weight")
    packed, scale = getattr(weight, "CB", None), getattr(weight, "SCB", None)
    if packed is not None and scale is not None:
        _before_first_forward[layer] = weakref.ref(packed), weakref.ref(scale)


def original_weight_and_scales(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return the packed weights that ``layer`` was quantized to and their scales, whatever its weight is now."""
    import torch

    state = layer.state
    packed, scale = state.CB, state.SCB
    if not torch.compiler.is_dynamo_compiling() and (noted := _before_first_forward.get(layer)) is not None:
        others = noted[0](), noted[1]()
        if others[0] is not None and others[0] is not packed:
            packed, scale = others
    if packed is None or scale is None or packed.is_meta or scale.is_meta:
        return None
    return packed, scale
