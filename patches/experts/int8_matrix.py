"""One matrix of an expert in INT8: quantized, multiplied and dequantized as ``Linear8bitLt`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed weights, and the scales of the rows."""
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    codes, scales, _ = int8_vectorwise_quant(matrix.detach().to(torch.float16).contiguous())
    return codes, scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the backward of ``Linear8bitLt`` multiplies by."""
    return codes.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


def multiply_int8(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, threshold: float) -> torch.Tensor:
    """``rows`` times the transposed matrix, by LLM.int8: columns of ``rows`` with outliers in floating point."""
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    whole = rows.contiguous()
    quantized_rows, row_scales, columns = int8_vectorwise_quant(whole.to(torch.float16), threshold=threshold)
    operators = torch.ops.bitsandbytes
    if threshold > 0:
        out, _ = operators.int8_mixed_scaled_mm(whole, quantized_rows, codes, row_scales, scales, columns, None)
    else:
        out = operators.int8_scaled_mm.default(quantized_rows, codes, row_scales, scales, bias=None, dtype=rows.dtype)
    result: torch.Tensor = out
    return result
