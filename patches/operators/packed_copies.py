"""The packed copies of 4-bit weights, for :mod:`.linear_4bit_packed`: which there are, when one is made. Imports torch.

A copy hangs on the storage of the weight that it was made from, under the address of the weight in it: it is the copy
of that weight alone, modules that share the weight share it, and it is freed with the memory of the weight. It refers
to no tensor of the weight. The tensors that it was made from are looked at before each use (see :mod:`.tensor_contents`).

Making a copy takes as long as 5 to 10 products without one, so it has to be used again. Where the next call brings
the weight in new memory (offloading to a disk) none is made; where it brings other contents in the same (layers that
are streamed through one buffer), at ever longer intervals. The knowledge about that hangs on the storage of
``absmax``, which stays where packed weights come and go.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

from ..quantized.four_bit import block_scales
from . import native_kernel
from .tensor_contents import Contents

_COPIES = "_patches_packed"
_USAGES = "_patches_packed_usage"

_ENOUGH_USES = 8
"""Products after which a copy has saved the time that it took to make."""

# Rows up to which the packed kernel is the faster one, for weights below and from 2**24 numbers on. With matrix units
# (AMX) the canonical way is fast, with large weights slow: it takes its memory anew from the system in each call.
_LARGE = 2**24
_HAS_MATRIX_UNITS = getattr(torch.cpu, "_is_amx_tile_supported", bool)()  # from torch 2.6 on
_FEW, _FEW_FOR_LARGE = (16, 48) if _HAS_MATRIX_UNITS else (64, 128)


alive: weakref.WeakSet[Packed] = weakref.WeakSet()
"""Every copy that there is."""


class Packed:
    """A packed copy: packed weights (uint8, ``(N, K / 2)``) and scales (bf16, ``(K / blocksize, N)``)."""

    contents: Contents
    usage: _Usage

    def __init__(self, weight: Tensor, scales: Tensor, book: Tensor, shape: tuple[int, ...], blocksize: int) -> None:
        self.weight, self.scales, self.book, self.shape, self.blocksize = weight, scales, book, shape, blocksize
        alive.add(self)
        self._native = native_kernel.bind_kernel(weight, scales, book, shape, blocksize)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x`` times the transpose of the weight, plus ``bias``."""
        x = x.contiguous()  # the kernel walks each row with stride 1
        if self._native is not None and x.dtype == torch.bfloat16 and not _profiler_enabled():
            result = self._native(x)
        else:
            result = torch.ops.bitsandbytes.gemv_4bit.default(
                x, self.weight, self.shape, self.scales, self.book, self.blocksize
            )
        return result if bias is None else result.add_(bias)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, quant_state: object) -> Tensor:
        """Return :meth:`product`, called as ``bitsandbytes.matmul_4bit``."""
        return self.product(x, bias)


class _Copies(dict[int, Packed]):
    """The copies of the weights in one storage, by address."""


class _Usage:
    """Counts of how often the copies of one weight were used."""

    def __init__(self) -> None:
        self.uses: int | None = None  # of the present copy; None without one, and after training has freed it
        self.copies_wasted = 0  # in a row
        self.calls_to_wait = 0  # until the next copy is made
        self.kept_in_training = False  # once training has freed a copy and it was made again
        self.forget: weakref.finalize[..., object] | None = None

    def allows(self, seen: bool) -> bool:
        """Tell whether to make a copy now that there is none; ``seen``: the packed weights lie where they lay before."""
        if self.uses is not None:
            self.copies_wasted = self.copies_wasted + 1 if self.uses < _ENOUGH_USES else 0
            self.calls_to_wait = _ENOUGH_USES << min(self.copies_wasted - 1, 10) if self.copies_wasted else 0
            self.uses = None
        if self.copies_wasted and not seen:
            return False
        self.calls_to_wait -= 1
        return self.calls_to_wait < 0


def has_few_rows(x: Tensor, shape: Sequence[int]) -> bool:
    """Tell whether ``x`` fits a weight of ``shape`` and has so few rows that the packed kernel is the faster one."""
    rows, columns = shape
    most = columns * (_FEW if rows * columns < _LARGE else _FEW_FOR_LARGE)
    return 0 < x.numel() <= most and x.shape[-1] == columns


def find_packed_copy(weight: Tensor, state: QuantState, offloaded: bool) -> Packed | None:
    """Return the packed copy of ``weight``, quantized to ``state``, as it is now; None if none is worth making.

    ``offloaded`` weights may come in new memory each time.
    """
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit would send each look at it through Python
        statistics, _ = block_scales.statistics_of(state)
        sources = (weight, *statistics, state.code)
        copies: _Copies | None = vars(weight.untyped_storage()).get(_COPIES)
        address = weight.data_ptr()
        if copies and (packed := copies.get(address)) is not None:
            if (
                packed.contents.are_those_of(sources)
                and packed.shape == state.shape
                and packed.blocksize == state.blocksize
            ):
                packed.usage.uses += 1  # type: ignore[operator]  # None where there is no copy
                return packed
            copies.pop(address, None)
        seen = copies is not None
        if not seen:
            vars(weight.untyped_storage())[_COPIES] = _Copies()
            if offloaded:
                return None
        usage = _usage_of(state.absmax)
        if not usage.allows(seen) or not all(t.is_cpu and t.is_contiguous() for t in sources):
            return None
        packed = _pack(weight, state)
        packed.contents, packed.usage, usage.uses = Contents(sources), usage, 0
        _keep(weight, packed)
        return packed


def free_packed_copy(weight: Tensor) -> None:
    """Free the packed copy of ``weight``, which is being trained through.

    For the first time only: a run that decodes again between steps would make it in each round, which takes longer
    than the steps.
    """
    with torch._C.DisableTorchFunctionSubclass():
        copies: Any = vars(weight.untyped_storage()).get(_COPIES)
        packed = copies.get(weight.data_ptr()) if copies else None
        if packed is not None and not packed.usage.kept_in_training:
            packed.usage.kept_in_training, packed.usage.uses = True, None
            del copies[weight.data_ptr()]


def _usage_of(absmax: Tensor) -> _Usage:
    usages: dict[int, _Usage]
    usages, address = vars(absmax.untyped_storage()).setdefault(_USAGES, {}), absmax.data_ptr()
    if address not in usages:
        usages[address] = _Usage()
    return usages[address]


def _keep(weight: Tensor, packed: Packed) -> None:
    """Hang ``packed`` where :func:`find_packed_copy` looks, and see to it that it goes with the weight."""
    storage, address = weight.untyped_storage(), weight.data_ptr()
    copies = vars(storage)[_COPIES]
    copies[address] = packed
    if packed.usage.forget is not None:
        packed.usage.forget()
    # Memory that is shared with others may outlive the weight.
    if storage.nbytes() > weight.nbytes and isinstance(weight, torch.nn.Parameter):
        packed.usage.forget = weakref.finalize(weight, _drop, weakref.ref(copies), address, weakref.ref(packed))
        packed.usage.forget.atexit = False


def _drop(copies: weakref.ref[_Copies], address: int, packed: weakref.ref[Packed]) -> None:
    held = copies()
    if held is not None and held.get(address) is packed():
        held.pop(address, None)


@torch.no_grad()
def _pack(weight: Tensor, state: QuantState) -> Packed:
    """Convert ``weight`` by bitsandbytes' own function, with a copy of ``state``, because it writes to its argument."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    own = QuantState(state.absmax, state.shape, state.code, state.blocksize, dtype=torch.bfloat16)
    if (nested := state.state2) is not None:
        own.nested, own.offset = True, state.offset
        own.state2 = QuantState(nested.absmax, code=nested.code, blocksize=nested.blocksize, dtype=torch.float32)
    converted, own = _convert_weight_packed_for_cpu(weight.detach().reshape(-1), own)
    return Packed(converted, own.absmax, state.code, state.shape, state.blocksize)
