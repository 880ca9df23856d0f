"""Operators that stand for one quantized linear layer inside a compiled graph.

Imported only while torch.compile traces a patched function. An operator, once defined, stays in
the dispatcher for the life of the process; without the patch nothing calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import bitsandbytes.autograd._functions as functions
import bitsandbytes.functional as F
import torch

try:
    RELEASE = version("bitsandbytes")
except PackageNotFoundError:  # imported from a source tree
    RELEASE = "unknown"

_library = torch.library.Library("bnb_patches", "FRAGMENT")


# -- linear_4bit -------------------------------------------------------------------------------

# `release` changes nothing here: it keeps a graph that one bitsandbytes made out of the on-disk
# cache of another, because the cache sees the operator's arguments but not what it expands to.
_library.define(
    "linear_4bit(Tensor x, Tensor weight, Tensor? bias, Tensor absmax, SymInt[] shape, ScalarType dtype, "
    "int blocksize, str quant_type, Tensor? offset, Tensor? absmax2, Tensor? code2, int blocksize2, "
    "ScalarType dtype2, str release) -> Tensor"
)


def _linear_4bit(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    absmax: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    blocksize: int,
    quant_type: str,
    offset: torch.Tensor | None,
    absmax2: torch.Tensor | None,
    code2: torch.Tensor | None,
    blocksize2: int,
    dtype2: torch.dtype,
    release: str,
) -> torch.Tensor:
    """The library's own 4-bit function on a quantization state put together from its parts."""
    state2 = None
    if absmax2 is not None:
        state2 = F.QuantState(absmax=absmax2, code=code2, blocksize=blocksize2, dtype=dtype2)
    state = F.QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=dtype,
        offset=offset,
        state2=state2,
    )
    return functions.MatMul4Bit.apply(x, weight, None, bias, state)


# Composite: Dynamo puts one operator into its graph, AOT autograd expands it to what stood there before.
_library.impl("linear_4bit", _linear_4bit, "CompositeImplicitAutograd")


# -- int8_linear -------------------------------------------------------------------------------

_library.define(
    "int8_linear(Tensor x, Tensor CB, Tensor SCB, Tensor? bias, float threshold) -> Tensor",
    # How many outlier columns there are is read back from the device: no CUDA graph can hold that.
    tags=tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)),
)


def _int8_linear(
    x: torch.Tensor, CB: torch.Tensor, SCB: torch.Tensor, bias: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """LLM.int8() product of ``x`` [..., K] with codes [N, K] and row scales [N]; [..., N] of x's dtype."""
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], CB.shape[0]))
    rows = x.reshape(-1, x.shape[-1])
    CA, SCA, outliers = F.int8_vectorwise_quant(rows.to(torch.float16), threshold=threshold)
    output, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(rows, CA, CB, SCA, SCB, outliers, bias)
    return output.reshape(*x.shape[:-1], CB.shape[0])


def _int8_linear_fake(x, CB, SCB, bias, threshold):
    return x.new_empty((*x.shape[:-1], CB.shape[0]))


def _int8_linear_setup(ctx, inputs, output) -> None:
    x, CB, SCB, bias, _ = inputs
    ctx.save_for_backward(CB, SCB)
    ctx.dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _int8_linear_backward(ctx, grad):
    """The roundings of ``MatMul8bitLt.backward``, in its order."""
    CB, SCB = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[3]:
        grad_bias = grad.sum(0, dtype=ctx.bias_dtype).sum_to_size(grad.shape[-1])
    if ctx.needs_input_grad[0]:
        weight = CB.to(ctx.dtype, copy=True).mul_(SCB.unsqueeze(1).mul(1.0 / 127.0))
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_x = torch.matmul(rows.to(ctx.dtype), weight).view(*grad.shape[:-1], CB.shape[1])
    return grad_x, None, None, grad_bias, None


_library.impl("int8_linear", _int8_linear, "CompositeExplicitAutograd")
torch.library.register_fake("bnb_patches::int8_linear", _int8_linear_fake, lib=_library)
torch.library.register_autograd(
    "bnb_patches::int8_linear", _int8_linear_backward, setup_context=_int8_linear_setup, lib=_library
)
