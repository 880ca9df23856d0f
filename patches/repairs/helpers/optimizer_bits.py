"""Optimizer states of bitsandbytes in 8 bits and in 32, and from one to the other.

A state in 8 bits is codes, a table of what codes mean (``qmap1``) and a scale for each block of 256 values
(``absmax1``); AdEMAMix has two states in one tensor, one behind the other, with two rows of scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
"""Values of an 8-bit state that share a scale."""


def to_float(codes: Tensor, table: Tensor, scales: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Values of ``codes``, the part at ``offset`` of a state of ``shape`` whose ``scales`` are whole."""
    import torch

    if scales.dim() == 2:
        parts = [to_float(part, table, own, offset[1:], shape[1:]) for part, own in zip(codes, scales[offset[0] :])]
        return torch.stack(parts) if parts else codes.float()
    at = torch.zeros((), dtype=torch.int64, device=codes.device)
    for first, length, whole in zip(offset, codes.shape, shape):
        rows = torch.arange(first, first + length, device=codes.device)
        at = at.unsqueeze(-1) * whole + rows
    return table.to(codes.device)[codes.long()] * scales.to(codes.device)[at // BLOCK]


def to_8_bits(values: Tensor, table: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, of the shape of ``scales``, of a part that begins and ends with a block or with the state."""
    import torch
    from bitsandbytes.functional import quantize_blockwise

    if scales.dim() == 2:
        codes, own = zip(*(to_8_bits(part, table, row) for part, row in zip(values, scales)))
        return torch.stack(codes), torch.stack(own)
    if not values.numel():
        return values.to(torch.uint8), scales
    found, state = quantize_blockwise(values.contiguous(), code=table.to(values.device), blocksize=BLOCK)
    return found.view(values.shape), state.absmax
