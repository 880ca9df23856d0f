"""``bnb_patches::linear_4bit_…``: one 4-bit linear layer inside a compiled graph.

Imported only while torch.compile traces a patched function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import bitsandbytes.functional as F
import torch
from bitsandbytes.autograd._functions import MatMul4Bit

from .code_digest import define_operator


def _linear_4bit(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    absmax: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    blocksize: int,
    quant_type: str,
    offset: torch.Tensor | None,
    absmax2: torch.Tensor | None,
    code2: torch.Tensor | None,
    blocksize2: int,
    dtype2: torch.dtype,
) -> torch.Tensor:
    """Return the library's own 4-bit product, on a quantization state put together from its parts."""
    state2 = None
    if absmax2 is not None:
        state2 = F.QuantState(absmax=absmax2, code=code2, blocksize=blocksize2, dtype=dtype2)
    state = F.QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=dtype,
        offset=offset,
        state2=state2,
    )
    output: torch.Tensor = MatMul4Bit.apply(x, weight, None, bias, state)
    return output


OPERATOR: Callable[..., torch.Tensor] = define_operator(
    "linear_4bit",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor absmax, SymInt[] shape, ScalarType dtype, int blocksize, str quant_type, "
    "Tensor? offset, Tensor? absmax2, Tensor? code2, int blocksize2, ScalarType dtype2) -> Tensor",
    # Composite: Dynamo puts one operator into its graph, AOT autograd expands it to what stood there before.
    "CompositeImplicitAutograd",
    _linear_4bit,
)
