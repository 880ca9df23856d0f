"""``bnb_patches::linear_4bit_packed``: a 4-bit layer in inference on a CPU with AVX512-BF16. Imports torch.

A pure function of the canonical weight, so torch.compile needs to know nothing of packed copies. How many rows the
input has decides at run time which kernel computes, so shapes may be dynamic, or unknown to the compiler, or empty.
For graphs of torch.compile only: eager code asks :func:`kernel_for`, which saves it the way through the dispatcher,
and an exported program would need this operator wherever it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..quantized.four_bit import block_scales
from . import packed_copies
from .code_digest import versioned_name

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState


def kernel_for(x: Tensor, weight: Tensor, state: QuantState, offloaded: bool) -> packed_copies.Packed | None:
    """The packed copy to multiply ``x`` by, in the place of ``weight``; None where the canonical way is to be taken."""
    if not packed_copies.has_few_rows(x, state.shape):
        return None
    statistics, nested_blocksize = block_scales.statistics_of(state)
    book, shape, blocksize = state.code, state.shape, state.blocksize
    return packed_copies.find_packed_copy(weight, statistics, book, shape, blocksize, nested_blocksize, offloaded)


def is_watched() -> bool:
    """Whether a mode, a tracer, a transform or tangents have to see each operator that is called."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _linear(
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    code: Tensor,
    bias: Tensor | None,
    shape: Sequence[int],
    blocksize: int,
    nested_blocksize: int,
    quant_type: str,
) -> Tensor:
    if packed_copies.has_few_rows(x, shape):
        packed = packed_copies.find_packed_copy(
            weight, tuple(statistics), code, tuple(shape), blocksize, nested_blocksize
        )
        if packed is not None:
            return packed.product(x, bias)
    return block_scales.linear_4bit(x, weight, statistics, bias, shape, blocksize, nested_blocksize, quant_type)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    code: Tensor,
    bias: Tensor | None,
    shape: Sequence[int],
    blocksize: int,
    nested_blocksize: int,
    quant_type: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


_NAME = versioned_name("linear_4bit_packed", _linear, _linear_fake)
_library = torch.library.Library("bnb_patches", "FRAGMENT")
_library.define(
    f"{_NAME}(Tensor x, Tensor weight, Tensor[] statistics, Tensor code, Tensor? bias, int[] shape, "
    "int blocksize, int nested_blocksize, str quant_type) -> Tensor"
)
_library.impl(_NAME, _linear, "CPU")
torch.library.register_fake(f"bnb_patches::{_NAME}", _linear_fake, lib=_library)

OPERATOR: Callable[..., Tensor] = getattr(torch.ops.bnb_patches, _NAME).default
