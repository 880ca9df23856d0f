"""The gradient of a product whose activations were rounded on the way. Imports torch.

Imported when a gradient is wanted for the first time.
"""

from __future__ import annotations

from typing import Any

import torch

from ..quantized import saved_for_backward


class StraightThrough(torch.autograd.Function):
    """``output``, a product of ``x`` and a quantized ``weight`` that autograd does not follow to ``x``, tied to it."""

    @staticmethod
    def forward(output: torch.Tensor, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return output.detach()  # no view in the eyes of autograd: the model may write into it

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, Any], output: torch.Tensor) -> None:
        _, x, weight = inputs
        # A reference: hooks on saved tensors would carry or recompute a frozen weight that stays where it is.
        ctx.weight = weight
        ctx.version = None if torch.compiler.is_compiling() or weight.is_inference() else weight._version
        if _static_scale(weight) is not None:
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        weight = ctx.weight
        if ctx.version is not None and weight._version != ctx.version:
            saved_for_backward.raise_version_error((weight,), (ctx.version,))
        # What LinearActivationQuantizedTensor (torchao < 0.18) holds; it cannot be dequantized itself.
        dense = getattr(weight, "original_weight_tensor", weight).dequantize()
        grad_x = grad @ dense.to(grad.dtype)
        if _static_scale(weight) is not None:
            (x,) = ctx.saved_tensors
            grad_x = grad_x * _unclipped(x, weight)
        smoothed = getattr(weight, "act_pre_scale", None)
        if smoothed is not None:
            grad_x = (grad_x * smoothed).to(grad.dtype)
        return grad, grad_x, None


def _static_scale(weight: Any) -> torch.Tensor | None:
    """Return the fixed scale of the activations, by which large ones are clipped; None if it is measured."""
    scale: torch.Tensor | None = getattr(weight, "act_quant_scale", None)
    return scale


def _unclipped(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return a mask of the values of ``x`` that are not clipped at the static scale of ``weight``: others have no gradient."""
    smoothed, zero_point = (getattr(weight, name, None) for name in ("act_pre_scale", "act_quant_zero_point"))
    if smoothed is not None:
        x = x * smoothed
    rounded: torch.Tensor = (x.float() / weight.act_quant_scale).round()
    if zero_point is not None:
        rounded = rounded + zero_point
    bounds = torch.iinfo(torch.int8)
    halved = 2 if getattr(weight.act_quant_kwargs, "reduce_range", False) else 1
    return (rounded >= bounds.min // halved) & (rounded <= bounds.max // halved)
