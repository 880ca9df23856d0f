"""The present state of a 4-bit weight, read from its contents: the quantization state, and whether its bytes are packed.

``Params4bit.bnb_quantized`` stays True when someone writes other values into the weight (``weight.data = dequantized``), and
``quant_state`` stays where it is. So whether there are packed bytes is a matter of their number as well: two values share
a byte, and no dtype that a dequantized weight has is as small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

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
    """Tell whether ``weight`` was quantized, and still holds packed bytes."""
    if not is_marked_quantized(weight):
        return False
    state = get_quant_state(weight)
    if state is None or state.shape is None:
        return 1 in weight.shape  # packed weights lie in one column
    return bool(weight.nbytes <= packed_bytes(state.shape))


def is_for_cpu_kernel(state: QuantState | None) -> bool:
    """Tell whether the bytes under ``state`` are in the layout of the AVX512-BF16 kernel, which nothing else reads."""
    # Not by getattr: QuantState looks up attributes that it lacks.
    return state is not None and bool(state.__dict__.get("packing_format_for_cpu", False))


def places_of_tensors(state: QuantState) -> Iterator[tuple[QuantState, str]]:
    """Yield the places of the tensors of ``state``: it or its nested state, and the attribute."""
    nested = state.__dict__.get("state2")
    for holder in (state,) if nested is None else (state, nested):
        for name in ("absmax", "code", "offset"):
            if holder.__dict__.get(name) is not None:
                yield holder, name
