"""Whether two tensors hold the same bits, and a fingerprint by which a tensor is known again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_ROW, _SLAB = 1 << 14, 16  # words that are summed to one, and such rows at once: as many as a processor's cache holds


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether dtype, shape, device and every bit of both are the same, NaNs included; False on meta."""
    import torch

    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device) or one.is_meta:
        return False
    plain = (tensor.detach().as_subclass(torch.Tensor) for tensor in (one, other))
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in plain))


def fingerprint(tensor: Tensor) -> int:
    """Return a number that other bits, or the same in another order, have by chance only; the same on every device."""
    import torch

    bits = tensor.data.as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
    whole = bits.numel() // 4 * 4
    words, rest = bits[:whole].clone() if bits.storage_offset() % 4 else bits[:whole], bits[whole:].to(torch.int32)
    words = torch.cat([words.view(torch.int32), rest]) if rest.numel() else words.view(torch.int32)
    count = words.numel()
    factors = _factors(tensor.device)
    while words.numel() > 2:
        sums = [_weighted(slab, factors) for slab in words.split(_SLAB * _ROW)]
        words = torch.cat(sums).view(torch.int32)
    return hash((count, *words.tolist()))


def _weighted(words: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each row of ``words``, each word times the factor of its place; the last row may be short."""
    import torch

    whole = words.numel() // _ROW * _ROW
    rows, rest = words[:whole].view(-1, _ROW).to(torch.int64), words[whole:].to(torch.int64)
    sums = rows.mul_(factors).sum(1) if whole else rest[:0]
    return torch.cat([sums, (rest * factors[: rest.numel()]).sum(0, keepdim=True)]) if rest.numel() else sums


_known: dict[torch.device, Tensor] = {}
"""The factors on each device, 128 KiB."""


def _factors(device: torch.device) -> Tensor:
    """Return an odd number for each place in a row: without a pattern, and always the same."""
    import torch

    if device in _known:
        return _known[device]
    mixed = torch.arange(1, _ROW + 1, device=device) * _ODD
    for shift in (30, 27, 31):
        mixed = (mixed ^ (mixed >> shift)) * _ODD
    mixed = mixed | 1
    if type(mixed) is torch.Tensor and not mixed.is_inference():  # not what a mode made, a fake tensor among them
        _known[device] = mixed
    return mixed
