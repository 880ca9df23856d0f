"""Optimizer states of bitsandbytes in 8 bits and in 32, and from one to the other.

A state in 8 bits is quantized values, a table of the numbers that they stand for (``qmap1``) and a scale for each block of 256
values (``absmax1``); AdEMAMix has two states in one tensor, one behind the other, with two rows of scales.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..engine import Rewrite

if TYPE_CHECKING:
    from torch import Tensor

BLOCKSIZE = 256
"""Values of an 8-bit state that share a scale."""


def to_float(
    quantized: Tensor, table: Tensor, scales: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Return the float32 values of ``quantized``, the part at ``offset`` of a state of ``shape``; ``scales`` are of all of it."""
    import torch

    if scales.dim() == 2:
        parts = [to_float(part, table, own, offset[1:], shape[1:]) for part, own in zip(quantized, scales[offset[0] :])]
        return torch.stack(parts) if parts else quantized.float()
    at = torch.zeros((), dtype=torch.int64, device=quantized.device)
    for first, length, whole in zip(offset, quantized.shape, shape):
        rows = torch.arange(first, first + length, device=quantized.device)
        at = at.unsqueeze(-1) * whole + rows
    return table.to(quantized.device)[quantized.long()] * scales.to(quantized.device)[at // BLOCKSIZE]


def to_8_bits(values: Tensor, table: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``values`` in 8 bits and their scales, in the shape of ``scales``.

    ``values`` are a part of a state that begins and ends with a block or with the state.
    """
    import torch
    from bitsandbytes.functional import quantize_blockwise

    if scales.dim() == 2:
        quantized, own = zip(*(to_8_bits(part, table, row) for part, row in zip(values, scales)))
        return torch.stack(quantized), torch.stack(own)
    if not values.numel():
        return values.to(torch.uint8), scales
    found, state = quantize_blockwise(values.contiguous(), code=table.to(values.device), blocksize=BLOCKSIZE)
    return found.view(values.shape), state.absmax


STATE = re.compile(r"(.*__bnb_optimizer_quant_state__\.)state([12])")
"""The name of a state in a flat state dict, in two groups: the prefix that its table and scales share, and its number."""


def match_state_bit_width(full: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Return ``full``, flat and unsharded, with each state in the bit width of the sharded state in ``local`` that takes it."""
    import torch

    for key, value in list(full.items()):
        found = STATE.fullmatch(key)
        own: Any = local.get(key)
        if found is None or not hasattr(own, "to_local") or {own.dtype, value.dtype} != {torch.uint8, torch.float32}:
            continue
        names = [f"{found[1]}{part}{found[2]}" for part in ("qmap", "absmax")]
        if own.dtype == torch.uint8:
            table, scales = local[names[0]], local[names[1]]
            whole = torch.empty(scales.shape, dtype=torch.float32, device=value.device)
            full[key], full[names[1]] = to_8_bits(value, table, whole)
            full[names[0]] = table
        elif all(name in full for name in names):
            table, scales = (full.pop(name) for name in names)
            full[key] = to_float(value, table, scales, (0,) * value.dim(), tuple(value.shape))
        else:
            raise ValueError(
                f"{key!r} is an 8-bit optimizer state, and the state dict lacks {names[1]!r}, which is needed to read it."
            )
    return full


MATCH_STATE_BIT_WIDTH = tuple(
    Rewrite(
        f"torch.distributed._state_dict_utils:{function}",
        find="full_state_dict.items()",
        replace="_patches_same_bits(full_state_dict, local_state_dict).items()",
        names={"_patches_same_bits": match_state_bit_width},
    )
    for function in ("_broadcast_state_dict", "_distribute_state_dict")
)
"""The edits that bring a full state dict into the bits that the ranks have."""
