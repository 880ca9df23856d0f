"""``bnb_patches::int8_linear_…``: one INT8 linear layer inside a compiled graph.

Imported only while torch.compile traces a patched function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes.functional as F
import torch

from .code_digest import define_operator


def _int8_linear(
    x: torch.Tensor, CB: torch.Tensor, SCB: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """Return the LLM.int8() product of ``x`` [..., K] and packed weights [N, K] with row scales [N]: [..., N], x's dtype."""
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], CB.shape[0]))
    rows = x.reshape(-1, x.shape[-1])
    CA, SCA, outliers = F.int8_vectorwise_quant(rows.to(torch.float16), threshold=threshold)
    output: torch.Tensor
    output, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(rows, CA, CB, SCA, SCB, outliers, bias)
    # Not as a view: with backend="eager" autograd gets to see this very tensor, and refuses writes into one.
    return output.reshape(*x.shape[:-1], CB.shape[0]).detach()


def _int8_linear_fake(x: torch.Tensor, CB: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], CB.shape[0]))


def _int8_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, CB, SCB, bias, _ = inputs
    ctx.save_for_backward(CB, SCB)
    ctx.dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _int8_linear_backward(
    ctx: Any, grad: torch.Tensor
) -> tuple[torch.Tensor | None, None, None, torch.Tensor | None, None]:
    """Return the gradients of ``x`` and ``bias``, rounded as in ``MatMul8bitLt.backward``, in its order."""
    CB, SCB = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[3]:
        grad_bias = grad.sum(0, dtype=ctx.bias_dtype).sum_to_size(grad.shape[-1])
    if ctx.needs_input_grad[0]:
        weight = CB.to(ctx.dtype, copy=True).mul_(SCB.unsqueeze(1).mul(1.0 / 127.0))
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_x = torch.matmul(rows.to(ctx.dtype), weight).view(*grad.shape[:-1], CB.shape[1])
    return grad_x, None, None, grad_bias, None


OPERATOR: Callable[..., torch.Tensor] = define_operator(
    "int8_linear",
    "(Tensor x, Tensor CB, Tensor SCB, Tensor? bias, float threshold) -> Tensor",
    "CompositeExplicitAutograd",
    _int8_linear,
    _int8_linear_fake,
    _int8_linear_backward,
    _int8_linear_setup,
    # How many outlier columns there are is read back from the device: no CUDA graph can hold that.
    tags=tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)),
)
