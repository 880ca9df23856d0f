"""The dtype in which 4-bit weights are dequantized: their quantization states have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .quant_states import get_quant_state

if TYPE_CHECKING:
    import torch


def set_below(module: Any, dtype: torch.dtype | None, own_dtype: Callable[[Any], torch.dtype | None]) -> None:
    """Give the states in ``module``, a part of a model of ``dtype``, that dtype; ``own_dtype`` is the one of a part, or None."""
    dtype = own_dtype(module) or dtype
    state = get_quant_state(getattr(module, "weight", None))
    if dtype is not None and state is not None:
        state.dtype = dtype
    for child in module.children():
        set_below(child, dtype, own_dtype)
