"""What the patches share whose package dequantizes NF4 weights through ctypes, which Dynamo cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import Finding
from ..reproducers.graphs import in_pieces, refused

if TYPE_CHECKING:
    import torch


def traced(W: torch.Tensor, quant_state: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    """While compiling: 4-bit ``W`` dequantized, transposed if it was; else None.

    None too for a ``quant_state`` that is not a ``QuantState``: the old list format, or another kind of weight.
    """
    import torch

    if not torch.compiler.is_compiling():
        return None
    from bitsandbytes.functional import QuantState, dequantize_4bit

    return dequantize_4bit(W, quant_state, out=out) if isinstance(quant_state, QuantState) else None


def compiled(dequantize: Callable[..., torch.Tensor]) -> Finding:
    """Whether a product with a weight (64 x 64, bfloat16) that ``dequantize`` unpacks is one graph."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, dtype=torch.bfloat16, device=device)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return x @ dequantize(packed, state).t()

    x = torch.randn(2, 64, dtype=torch.bfloat16, device=device)
    return in_pieces(call, x) if device == "cuda" else refused(call, x)  # without a GPU its C functions are not there
