"""One matrix of an expert in INT8: quantized, multiplied and dequantized as ``Linear8bitLt`` does."""

from __future__ import annotations

import torch
from bitsandbytes import functional


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed weights of ``matrix`` (rows, columns), and the scales of its rows."""
    packed, scales, _ = functional.int8_vectorwise_quant(matrix.detach().to(torch.float16).contiguous())
    return packed, scales


def dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix that the backward of ``Linear8bitLt`` multiplies by."""
    return packed.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


def multiply_int8(rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, threshold: float) -> torch.Tensor:
    """Multiply ``rows`` by the transposed matrix, by LLM.int8: columns of ``rows`` with outliers in floating point."""
    whole = rows.contiguous()
    quantized_rows, row_scales, columns = functional.int8_vectorwise_quant(whole.to(torch.float16), threshold=threshold)
    operators = torch.ops.bitsandbytes
    if threshold > 0:
        out, _ = operators.int8_mixed_scaled_mm(whole, quantized_rows, packed, row_scales, scales, columns, None)
    else:
        out = operators.int8_scaled_mm.default(quantized_rows, packed, row_scales, scales, bias=None, dtype=rows.dtype)
    result: torch.Tensor = out
    return result
