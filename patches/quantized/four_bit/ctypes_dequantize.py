"""What the patches share whose package dequantizes NF4 weights through ctypes, which Dynamo cannot trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def dequantize_if_traced(W: torch.Tensor, quant_state: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    """While compiling: 4-bit ``W`` dequantized, transposed if it was; else None.

    None too for a ``quant_state`` that is not a ``QuantState``: the old list format, or another kind of weight.
    """
    import torch

    if not torch.compiler.is_compiling():
        return None
    from bitsandbytes.functional import QuantState, dequantize_4bit

    return dequantize_4bit(W, quant_state, out=out) if isinstance(quant_state, QuantState) else None
