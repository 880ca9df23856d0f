"""The weight that a quantized layer stands for, for tuners of peft that know nothing of quantized layers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...engine import Rewrite
from ..four_bit import quant_states
from ..int8 import plain_weights, row_scales
from . import dequantized_in_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_WITH_A_FLAG = ("hira", "lora", "oft", "pvera", "randlora", "road", "vera")
"""Tuners that merge into packed weights, by layers of their own for models that say that they are quantized."""


def dequantize_weight(layer: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight of ``layer``, dequantized (to ``dtype``) if bitsandbytes quantized it; else the parameter itself."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    weight: Tensor = layer.weight
    if not isinstance(layer, (Linear4bit, Linear8bitLt)) and not isinstance(weight, (Int8Params, Params4bit)):
        return weight  # before anything that takes time: forwards of adapters on plain layers ask, too
    if weight.device.type == "meta":
        return weight  # offloaded, or not loaded yet
    import torch
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    dense: Tensor
    if is_packed_int8(layer):
        # Scales that are not known are found by contents, which a compiler cannot follow.
        known = row_scales.known_scales(layer) if torch.compiler.is_compiling() else None
        dense = int8_vectorwise_dequant(weight.data, row_scales.require_scales(layer) if known is None else known)
    elif is_plain_packed_int8(layer, weight):
        dense = dequantize_plain(layer, weight)
    elif dequantized_in_place.holds_floats(weight):
        return weight
    elif isinstance(weight, Params4bit) and (state := quant_states.get_quant_state(weight)) is not None:
        dense = dequantize_4bit(weight.data, state)
    elif _is_sharded(layer):
        dense = dequantize_4bit(weight.data, quant_states.get_quant_state(layer))  # as FSDP2 gathers it
    else:
        return weight
    return dense.to(dtype or dense.dtype)


def _is_sharded(layer: Any) -> bool:
    """Tell whether the weight of ``layer`` is its packed 4-bit weight as FSDP2 keeps it: a plain parameter."""
    from bitsandbytes.nn import Linear4bit

    return (
        isinstance(layer, Linear4bit)
        and quant_states.get_quant_state(layer) is not None
        and layer.weight.shape[1:] == (1,)
    )


def dense_dtype(layer: Any) -> torch.dtype:
    """Return the dtype of the result of :func:`dequantize_weight`, without dequantizing."""
    import torch

    weight = layer.weight
    if is_packed_int8(layer) or is_plain_packed_int8(layer, weight):
        return torch.float32
    state = quant_states.get_quant_state(weight) if quant_states.is_packed(weight) else None
    dtype: torch.dtype = weight.dtype if state is None else state.dtype
    return dtype


def is_packed_int8(layer: Any) -> bool:
    """Tell whether the weight of ``layer`` is packed INT8 weights."""
    import torch
    from bitsandbytes.nn import Int8Params

    return isinstance(layer.weight, Int8Params) and layer.weight.dtype == torch.int8


def is_plain_packed_int8(layer: Any, weight: Tensor) -> bool:
    """Tell whether ``weight`` is packed INT8 weights of ``layer`` in a plain parameter, as FSDP2 gathers them."""
    import torch

    if weight.dtype != torch.int8:
        return False
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    return isinstance(layer, Linear8bitLt) and not isinstance(weight, Int8Params)


def dequantize_plain(layer: Any, weight: Tensor) -> Tensor:
    """Return packed INT8 weights in a plain parameter dequantized, by the scales that the forward of ``layer`` uses."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    dense: Tensor = int8_vectorwise_dequant(weight.data, plain_weights.find_scale_of_plain(layer, weight))
    return dense


def weight_or_dense(layer: Any, weight: Tensor) -> Tensor:
    """Return ``weight``, dequantized if it is packed INT8 weights of ``layer`` in a plain parameter."""
    return dequantize_plain(layer, weight) if is_plain_packed_int8(layer, weight) else weight


def base_weight_for_input(tuner: Any, x: Tensor) -> Tensor:
    """Return ``tuner.get_base_weight()`` of peft, dequantized also if FSDP2 has gathered it as a plain parameter.

    A dequantized weight has the dtype of ``x``, the input that it is multiplied with.
    """
    base = tuner.get_base_layer()
    plain = _is_sharded(base) and quant_states.get_quant_state(base.weight) is None
    return dense_for_input(dequantize_weight(base) if plain else tuner.get_base_weight(), base, x)


def dense_for_input(weight: Tensor, layer: Any, x: Tensor) -> Tensor:
    """Return ``weight`` in the dtype of ``x``, its input, if it was dequantized from ``layer``; else as it is."""
    return weight.to(x.dtype) if x.is_floating_point() and describe_packing(layer) else weight


def dense_shape(layer: Any) -> torch.Size:
    """Return the shape of the dense weight of ``layer``, packed or not."""
    state = quant_states.get_quant_state(layer.weight) if quant_states.is_packed(layer.weight) else None
    shape: torch.Size = layer.weight.shape if state is None else state.shape
    return shape


def describe_packing(layer: Any) -> str:
    """Return "packed INT8 weights" or "packed 4-bit weights" if ``layer`` holds them; else "". It imports nothing."""
    import torch

    weight = getattr(layer, "weight", None)  # of a module of a user's it may be a number
    if "bitsandbytes.nn" not in sys.modules or not isinstance(weight, torch.Tensor):
        return ""
    if is_packed_int8(layer) or is_plain_packed_int8(layer, weight):
        return "packed INT8 weights"
    return "packed 4-bit weights" if quant_states.is_packed(weight) or _is_sharded(layer) else ""


def refuse_if_packed(layer: Any, tuner: Any) -> Any:
    """Return ``layer``; raise if it holds packed weights, to which ``tuner`` would add as if they were values."""
    what = describe_packing(layer)
    if not what:
        return layer
    name = type(tuner).__module__.partition("peft.tuners.")[2].partition(".")[0]
    which = f"the tuner {name!r}" if name else "a tuner"
    said = (
        f"{type(layer).__name__} {row_scales.name_of(layer)!r} holds {what}, and {which} of peft merges into unquantized "
        "weights only. Call dequantize() on the base model, load the adapter onto that, and merge there"
    )
    if name in _WITH_A_FLAG:
        said += ". Or set is_loaded_in_8bit (or is_loaded_in_4bit) = True on the model before the adapter is added"
    raise NotImplementedError(said)


def dequantize_in_forward(forward: str, when: str) -> Rewrite:
    """Return the edit of a ``forward`` of a layer of peft, ``module:Class.forward`` under ``peft.tuners``.

    It casts its input to the dtype of the weight, and computes with the weight: now dequantized, in the input's dtype.
    """
    weight = "self.get_base_layer().weight.data"
    return Rewrite(
        f"peft.tuners.{forward}",
        find=f"x = x.to({weight}.dtype)\norig_weight = {weight}",
        replace="orig_weight = _patches_dense_weight(self.get_base_layer(), x.dtype).data\nx = x.to(orig_weight.dtype)",
        names={"_patches_dense_weight": dequantize_weight},
        when=when,
    )


def refuse_merge(merge: str, when: str = "", statement: str = "base_layer = {}") -> Rewrite:
    """Return the edit of a ``merge`` of a layer of peft, ``module:Class.merge`` under ``peft.tuners``.

    It raises an error for packed weights. ``statement`` is the statement that takes the base layer.
    """
    return Rewrite(
        f"peft.tuners.{merge}",
        find=statement.format("self.get_base_layer()"),
        replace=statement.format("_patches_unless_codes(self.get_base_layer(), self)"),
        names={"_patches_unless_codes": refuse_if_packed},
        when=when,
    )


def refuse_no_merge(method: str) -> Rewrite:
    """Return the edit of a ``method`` that layers of peft inherit if they cannot merge: its error has no message."""
    return Rewrite(
        f"peft.tuners.tuners_utils:BaseTunerLayer.{method}",
        find="raise NotImplementedError",
        replace="_patches_unless_codes(self.get_base_layer(), self)\nraise NotImplementedError",
        names={"_patches_unless_codes": refuse_if_packed},
    )
