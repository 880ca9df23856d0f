"""Finding the scales of a plain tensor of packed INT8 weights in the place of a layer's ``Int8Params``.

FSDP2, ``functional_call`` and users put one there. Packed weights do not tell their scales. The layer's are right only for
the packed weights that the layer was quantized to, so the contents are compared. Any other packed weights without
scales of their own are an error, as they are without the plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...process.tensor_bits import have_same_bits
from . import row_scales, scale_ownership

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHARDED = "_patches_codes_sharded"
_QUANTIZED = "_patches_was_quantized"
_ONCE = "_patches_quantized_once"
_GIVEN = "_patches_given_with"
_OF_PLAIN = "_patches_state_of_plain"
"""The state has packed weights and scales since a plain tensor took the place of the weight that they were for, which
had not run."""
_LARGEST = 127
_CAST = (
    "the weight of {} was replaced by integers up to 127 in floating point: these are packed INT8 weights that were cast, not "
    "the values of the weight. Assign the values: packed * SCB[:, None] / 127"
)


def find_scale_of_plain(layer: Any, packed: Tensor) -> Tensor:
    """Return the row scales of ``packed``, the plain weight of ``layer``; raise an error that names it if they are unknown."""
    import torch

    state = layer.state
    kept, known = state.__dict__, state.SCB  # not by getattr: MatmulLtState has one of its own
    if not kept.get(_SHARDED, False) and kept.get(_GIVEN) is not packed:
        pair = scale_ownership.original_weight_and_scales(layer)
        if pair is None:
            raise row_scales.make_lost_error(layer)
        own, known = pair[0], pair[1]
        if _stands_for_own(layer, packed):
            return _own_scale(packed, known)
        own = own.to(packed.device)
        fits = own.shape == packed.shape and own.dtype == packed.dtype
        if fits and torch.compiler.is_compiling():
            torch._assert_async((own == packed).all(), _foreign("an INT8 layer"))
        elif not fits or not torch.equal(own, packed):
            raise RuntimeError(_foreign(f"{type(layer).__name__} {row_scales.name_of(layer)!r}"))
    if row_scales.is_lost(known):
        raise row_scales.make_lost_error(layer)
    found: Tensor = known.to(packed.device)
    return found


def _stands_for_own(layer: Any, packed: Tensor) -> bool:
    """Tell whether torch.export traces ``layer`` and ``packed`` are fake: without contents, they stand for its own weight."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if torch.compiler.is_dynamo_compiling() or not isinstance(packed, FakeTensor):
        return False
    return not layer.state.__dict__.get(_QUANTIZED, False)


def _own_scale(fake: Any, known: Tensor) -> Tensor:
    """Return the row scales that the weight behind ``fake`` has of its own; ``known`` if it has none."""
    converter = getattr(fake.fake_mode.fake_tensor_converter, "meta_converter", None)
    fakes = getattr(converter, "tensor_memo", {})  # of torch's own; without them, as if there were no other weight
    numbers = getattr(getattr(converter, "describer", None), "lookup_tensor", {})
    for weight, number in numbers.items():
        if fakes.get(number) is fake:
            own: Tensor | None = vars(weight).get("SCB")
            return known if own is None else own
    return known


def _foreign(which: str) -> str:
    return (
        f"the weight of {which} was replaced by a plain int8 tensor that differs from the packed weight of the layer, so "
        "the row scales of the layer (layer.state.SCB) do not fit it. Assign an Int8Params with both (Int8Params(codes, "
        "requires_grad=False, CB=codes, SCB=scales)), or load 'weight' and 'SCB' of the other layer with load_state_dict"
    )


def check_plain_weight(layer: Any) -> None:
    """Check before ``layer`` is saved or merged that its packed weights and scales belong together; else raise."""
    from bitsandbytes.nn import Int8Params

    weight = layer.weight
    if isinstance(weight, Int8Params):
        scale_ownership.sync_weight_with_state(layer)
    elif row_scales.is_int8(weight) and not weight.is_meta and row_scales.get_scales(weight) is None:
        # Without its class, a weight from a pickle still has its scales.
        if scale_ownership.original_weight_and_scales(layer) is not None:
            find_scale_of_plain(layer, weight)


def scale_to_save(layer: Any) -> Tensor | None:
    """Return the scales in the state of ``layer``; None if its weight is plain and not packed. Raise if they do not fit."""
    from bitsandbytes.nn import Int8Params

    weight = layer.weight
    if weight.is_floating_point() and not isinstance(weight, Int8Params) and not layer.state.has_fp16_weights:
        refuse_packed_values(layer, weight)
    known: Tensor | None = layer.state.SCB
    if known is None or layer.state.has_fp16_weights or isinstance(weight, Int8Params) or weight.is_meta:
        return known
    return find_scale_of_plain(layer, weight) if row_scales.is_int8(weight) else None


def refuse_packed_values(layer: Any, weight: Tensor) -> None:
    """Raise if ``weight``, a floating-point weight of a ``layer`` that was quantized, holds packed weights."""
    import torch

    marked = any(vars(layer.state).get(mark, False) for mark in (_QUANTIZED, _ONCE))
    quantized = marked or scale_ownership.original_weight_and_scales(layer) is not None
    if not quantized or weight.numel() == 0 or weight.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(~_looks_packed(weight), _CAST.format("an INT8 layer"))
    elif are_packed_values(weight):
        raise make_cast_error(layer)


def make_cast_error(layer: Any) -> RuntimeError:
    """Return the error for packed weights in floating point; ``layer`` is None if it is unknown."""
    return RuntimeError(
        _CAST.format("an INT8 layer" if layer is None else f"{type(layer).__name__} {row_scales.name_of(layer)!r}")
    )


def is_cast_packed_weight(weight: Any, layer: Any) -> bool:
    """Tell whether ``weight`` holds the packed weights that it was quantized to, in floating point."""
    import torch

    packed = vars(weight).get("CB")
    if packed is None:
        packed = getattr(getattr(layer, "state", None), "CB", None)
    if packed is None or packed.shape != weight.shape or packed.is_meta:
        return False
    return torch.equal(packed.to(weight.device, weight.dtype), weight.data.as_subclass(torch.Tensor))


def are_packed_values(weight: Tensor) -> bool:
    """Tell whether ``weight``, of floating point, holds whole numbers up to 127: packed weights that were cast."""
    return bool(_looks_packed(weight[:1])) and bool(_looks_packed(weight))


def _looks_packed(weight: Tensor) -> torch.Tensor:
    return (weight == weight.round()).all() & (weight.abs().amax() == _LARGEST)


def set_scale(layer: Any, scale: Tensor | None) -> None:
    """Make ``scale`` the row scales of the present weight of ``layer``, an ``Int8Params`` or a plain tensor."""
    weight, state = layer.weight, layer.state
    vars(state).pop(_GIVEN, None)
    if hasattr(weight, "CB"):
        if scale is not None and not row_scales.is_lost(weight.SCB):
            weight.SCB = scale
        else:
            state.SCB = scale
        return
    state.SCB = scale
    if scale is not None:
        setattr(state, _GIVEN, weight)


def record_quantized_to(layer: Any) -> None:
    """Note the packed weights of ``layer``, if it is quantized, and that it is: the weight may be deleted."""
    scale_ownership.record_original(layer)
    if not layer.state.__dict__.get(_ONCE, False) and scale_ownership.original_weight_and_scales(layer) is not None:
        setattr(layer.state, _ONCE, True)


def keep_replaced_weight(layer: Any, old: Any) -> None:
    """Keep packed weights and scales of ``old``, the former weight of ``layer``, if nothing else has them."""
    import torch

    weight, state = layer._parameters.get("weight"), vars(layer).get("state")
    if state is None or weight is None or weight is old:
        return
    if hasattr(weight, "CB"):
        vars(state).pop(_SHARDED, None)
        vars(state).pop(_QUANTIZED, None)
        record_quantized_to(layer)
        scale_ownership.on_weight_assigned(layer, weight)
        _forget_plain(layer, weight)
        return
    if not hasattr(old, "CB") or not row_scales.is_int8(old):
        return
    setattr(state, _QUANTIZED, True)
    if not row_scales.is_int8(weight):
        return
    packed, scale = old.CB, state.SCB if old.CB is None else old.SCB
    if row_scales.is_lost(scale):
        return
    if hasattr(weight, "_local_tensor") and weight.shape == old.shape:  # FSDP2 goes on with parameters of its own
        setattr(state, _SHARDED, True)
        state.SCB = scale
    elif packed is None or packed.shape != weight.shape or packed.is_meta or weight.is_meta:
        return
    elif torch.equal(packed.to(weight.device), weight):
        state.CB, state.SCB = packed, scale
        setattr(state, _OF_PLAIN, True)


def _forget_plain(layer: Any, weight: Any) -> None:
    """Clear the state that a plain tensor has left in ``layer``, unless it fits ``weight``, the new weight.

    The layer has not run, and users who find packed weights and scales in its state would write there.
    """
    state = layer.state
    if not vars(state).get(_OF_PLAIN, False):  # before the packed weights are compared: weights are assigned often
        return
    if state.CB is None or not row_scales.is_settled(weight) or not have_same_bits(weight, state.CB):
        del vars(state)[_OF_PLAIN]
        scale_ownership.clear_state(layer)
