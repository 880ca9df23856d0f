"""Dequantizing a 4-bit weight so that its blocks get their own scales, whatever the processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

_LANES = 16  # of AVX512, in float32: the kernel that takes wrong scales is for rows of whole vectors
_INT_MAX = 2**31 - 1  # it counts the columns of a row in C's int


def dequantize_blocks(
    data: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return ``torch.ops.bitsandbytes.dequantize_4bit``, called with rows that its kernel for CPUs reads rightly."""
    import torch

    operator: Callable[..., torch.Tensor] = torch.ops.bitsandbytes.dequantize_4bit.default
    if not is_misread(shape, blocksize) or data.device.type != "cpu":  # a Params4bit takes 1.5 us to name its device
        return operator(data, absmax, blocksize, quant_type, shape, dtype)
    return operator(data, absmax, blocksize, quant_type, _rows(shape, blocksize), dtype).view(shape)


def statistics_of(state: QuantState) -> tuple[tuple[torch.Tensor, ...], int]:
    """Return the tensors of ``state`` beside its code book, and the block size of nested scales, 0 without.

    The tensors are the scales; or 8-bit scales, offset, their scales and code book.
    """
    nested = state.state2
    if nested is None:
        return (state.absmax,), 0
    return (state.absmax, state.offset, nested.absmax, nested.code), nested.blocksize


def linear_4bit(x: torch.Tensor, packed: torch.Tensor, state: QuantState, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` times the transpose of a 4-bit weight, plus ``bias``, as CPUs without special kernels do."""
    import torch

    absmax, nested = state.absmax, state.state2
    if nested is not None:
        absmax = state.offset + torch.ops.bitsandbytes.dequantize_blockwise.default(
            absmax, nested.absmax.float(), nested.code.float(), nested.blocksize, torch.float32
        )
    weight = dequantize_blocks(packed, absmax, state.blocksize, state.quant_type, state.shape, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def is_misread(shape: Sequence[int], blocksize: int) -> bool:
    """Tell whether AVX512 would take the scales of other blocks for a weight of ``shape``."""
    return shape[-1] % _LANES == 0 and shape[-1] % blocksize != 0 and math.prod(shape[:-1]) > 1


def _rows(shape: Sequence[int], blocksize: int) -> tuple[int, int]:
    """Return a shape of as many numbers, in rows in which block and scale go together."""
    count = math.prod(shape)
    if count % blocksize == 0:
        return count // blocksize, blocksize
    # The last block is shorter. One row is right too; of two columns, none is a whole vector.
    return (1, count) if count <= _INT_MAX else (count // 2, 2)
