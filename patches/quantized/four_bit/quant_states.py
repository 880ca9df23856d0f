"""The present state of a 4-bit weight, read from its contents: the quantization state, and whether its bytes are packed.

``Params4bit.bnb_quantized`` stays True when someone writes other values into the weight (``weight.data = dequantized``), and
``quant_state`` stays where it is. So whether there are packed bytes is a matter of their number as well: two values share
a byte, and no dtype that a dequantized weight has is as small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

MARKS = frozenset({"quant_state", "bnb_quantized", "quant_storage", "blocksize"})
"""Attributes by which a plain ``Parameter`` is known as a 4-bit weight that was pickled."""


def get_quant_state(holder: Any) -> QuantState | None:
    """Return the quantization state that ``holder``, a weight or a layer, holds itself."""
    state: QuantState | None = getattr(holder, "quant_state", None)
    return state


def set_quant_state(state: QuantState | None, *holders: Any) -> None:
    """Make ``state`` the quantization state of each of ``holders``, weights and layers."""
    for holder in holders:
        holder.quant_state = state


def is_marked_quantized(weight: Any) -> bool:
    """Tell whether ``weight`` is marked as quantized. Whether it still holds packed bytes, :func:`is_packed` tells."""
    return bool(getattr(weight, "bnb_quantized", False))


def mark_quantized(weight: Any) -> None:
    weight.bnb_quantized = True


def packed_bytes(shape: Iterable[int]) -> int:
    """Return how many bytes the values of a weight of ``shape`` take, two to a byte."""
    return -(-prod(shape) // 2)


def is_packed(weight: Any) -> bool:
    """Tell whether ``weight`` was quantized, and still holds packed bytes.

    Written out, without a call of the functions above: each forward of a DoRA layer asks twice.
    """
    if not getattr(weight, "bnb_quantized", False):
        return False
    state: QuantState | None = getattr(weight, "quant_state", None)
    if state is None or state.shape is None:
        return 1 in weight.shape  # packed weights lie in one column
    return bool(weight.nbytes <= -(-prod(state.shape) // 2))


def is_for_cpu_kernel(state: QuantState | None) -> bool:
    """Tell whether the bytes under ``state`` are in the layout of the AVX512-BF16 kernel, which nothing else reads."""
    # Not by getattr: QuantState looks up attributes that it lacks.
    return state is not None and bool(state.__dict__.get("packing_format_for_cpu", False))


def canonical_state(layer: Linear4bit, is_compiling: Callable[[], bool], packed_copies: str) -> QuantState | None:
    """Return the quantization state of ``layer``; convert a repacked weight back, and free its packed copy in training.

    ``packed_copies``: the name of the module that holds the copies. Written out, without a call of the functions above:
    each forward calls it.
    """
    weight: Any = layer._parameters.get("weight")  # not `layer.weight`, which takes 0.6 us
    if weight is None:
        weight = layer.weight
    state: QuantState | None = getattr(weight, "quant_state", None)
    if state is None:
        return None
    if state.__dict__.get("packing_format_for_cpu", False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        weight.data, state = _convert_weight_packed_for_cpu_inverse(weight.data, state)
        set_quant_state(state, weight)
        return state
    # Layers that were pickled by an older release have no such attribute.
    if layer.training and layer.__dict__.get("support_avx512bf16_for_cpu", False):
        # Looked up, not imported: each training forward comes by, and most programs never pack a weight.
        copies = None if is_compiling() else sys.modules.get(packed_copies)
        if copies is not None and copies.alive and state.absmax.is_cpu:
            copies.free_packed_copy(weight)
    return state


def places_of_tensors(state: QuantState) -> Iterator[tuple[QuantState, str]]:
    """Yield the places of the tensors of ``state``: it or its nested state, and the attribute."""
    nested = state.__dict__.get("state2")
    for holder in (state,) if nested is None else (state, nested):
        for name in ("absmax", "code", "offset"):
            if holder.__dict__.get(name) is not None:
                yield holder, name
