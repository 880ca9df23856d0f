"""``bnb_patches::linear_4bit_packed``: a 4-bit layer in inference on a CPU with AVX512-BF16. Imports torch.

A pure function of the canonical weight, so torch.compile needs to know nothing of packed copies. How many rows the
input has decides at run time which kernel computes, so shapes may be dynamic, or unknown to the compiler, or empty.
For graphs of torch.compile only: eager code asks :func:`kernel_for`, which saves it the way through the dispatcher,
and an exported program would need this operator wherever it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor
from torch.autograd import forward_ad

from ..quantized.four_bit import block_scales
from . import packed_copies
from .code_digest import define_operator


def kernel_for(x: Tensor, weight: Tensor, state: QuantState, offloaded: bool) -> packed_copies.Packed | None:
    """Return the packed copy of ``weight`` to multiply ``x`` by; None where ``weight`` itself is to be taken."""
    if not packed_copies.has_few_rows(x, state.shape):
        return None
    return packed_copies.find_packed_copy(weight, state, offloaded)


def is_watched() -> bool:
    """Tell whether a mode, a tracer, a transform or tangents have to see each operator that is called."""
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
    absmax, *nested = statistics
    state = QuantState(absmax, torch.Size(shape), code, blocksize, quant_type)
    if nested:
        state.offset, absmax2, code2 = nested
        state.nested, state.state2 = True, QuantState(absmax2, code=code2, blocksize=nested_blocksize)
    packed = kernel_for(x, weight, state, offloaded=False)
    return block_scales.linear_4bit(x, weight, state, bias) if packed is None else packed.product(x, bias)


def _linear_fake(
    x: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    code: Tensor,
    bias: Tensor | None,
    shape: Sequence[int],
    *_: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


OPERATOR: Callable[..., Tensor] = define_operator(
    "linear_4bit_packed",
    "(Tensor x, Tensor weight, Tensor[] statistics, Tensor code, Tensor? bias, int[] shape, int blocksize, "
    "int nested_blocksize, str quant_type) -> Tensor",
    "CPU",
    _linear,
    _linear_fake,
)
