"""The packed product as a function of the canonical weight, for :mod:`.cpu_repack`. Imports torch.

``bnb_patches::linear_4bit_packed`` packs a 4-bit weight for the AVX512-BF16 kernel of bitsandbytes and
multiplies. The packed copy is a memo: it hangs on the storage of the weight that it was made from, so it
can belong to no other weight and is freed with it. As the op is a pure function of canonical tensors,
torch.compile needs to know nothing of the memo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_library = torch.library.Library("bnb_patches", "FRAGMENT")
_library.define(
    "linear_4bit_packed(Tensor x, Tensor weight, Tensor[] stats, Tensor code, int[] shape, int blocksize, "
    "int nested_blocksize) -> Tensor"
)


class _Source(NamedTuple):
    """Which contents a packed copy was made from."""

    storage: torch.UntypedStorage
    address: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Source:
        # Inference tensors count no versions; torch lets nobody write to them outside inference mode.
        version = 0 if tensor.is_inference() else tensor._version
        return cls(tensor.untyped_storage(), tensor.data_ptr(), version)


class _Memo(NamedTuple):
    """A packed copy (uint8, ``(N, K / 2)``), its scales (bf16, ``(K / blocksize, N)``), what they came from."""

    packed: Tensor
    scales: Tensor
    weight: tuple[int, int]
    stats: tuple[_Source, ...]


def release(weight: Tensor) -> None:
    """Free the packed copy of ``weight``, if there is one."""
    vars(weight.untyped_storage()).pop("_patches_packed", None)


def _packed(
    weight: Tensor, stats: Sequence[Tensor], code: Tensor, shape: Sequence[int], blocksize: int, nested: int
) -> _Memo:
    """The packed copy of ``weight``: the one made before if neither it nor its statistics changed."""
    storage, address, version = _Source.of(weight)
    sources = tuple(map(_Source.of, stats))
    memo = vars(storage).get("_patches_packed")
    if memo is None or memo.weight != (address, version) or memo.stats != sources:
        packed, scales = _pack(weight, stats, code, shape, blocksize, nested)
        # The memo does not hold the storage that holds it.
        memo = _Memo(packed, scales, (address, version), sources)
        storage._patches_packed = memo
    return memo


@torch.no_grad()
def _pack(
    weight: Tensor, stats: Sequence[Tensor], code: Tensor, shape: Sequence[int], blocksize: int, nested: int
) -> tuple[Tensor, Tensor]:
    """bitsandbytes' own conversion, on a private state: it writes to the one that it is given."""
    from bitsandbytes.functional import QuantState, _convert_weight_packed_for_cpu

    state = QuantState(stats[0], shape=torch.Size(shape), code=code, blocksize=blocksize, dtype=torch.bfloat16)
    if nested:
        _, state.offset, nested_absmax, nested_code = stats
        state.nested = True
        state.state2 = QuantState(nested_absmax, code=nested_code, blocksize=nested, dtype=torch.float32)
    packed, state = _convert_weight_packed_for_cpu(weight.detach().reshape(-1), state)
    return packed, state.absmax


def linear(
    x: Tensor,
    weight: Tensor,
    stats: Sequence[Tensor],
    code: Tensor,
    shape: Sequence[int],
    blocksize: int,
    nested_blocksize: int,
) -> Tensor:
    """``x`` ``(…, K)`` times the transpose of a canonical 4-bit ``weight`` of ``shape`` ``(N, K)``: ``(…, N)``.

    ``stats`` are the scales, or (8-bit scales, offset, their scales, their code book) if nested.
    """
    with torch._C.DisableTorchFunctionSubclass():  # Params4bit would send each look at it through Python
        memo = _packed(weight, stats, code, shape, blocksize, nested_blocksize)
    # The kernel walks each row of x with stride 1.
    return torch.ops.bitsandbytes.gemv_4bit.default(
        x.contiguous(), memo.packed, shape, memo.scales, code, blocksize
    )


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    stats: Sequence[Tensor],
    code: Tensor,
    shape: Sequence[int],
    blocksize: int,
    nested_blocksize: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


_library.impl("linear_4bit_packed", linear, "CPU")
torch.library.register_fake("bnb_patches::linear_4bit_packed", _linear_fake, lib=_library)
