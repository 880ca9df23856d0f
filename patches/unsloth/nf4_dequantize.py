"""unsloth's LoRA kernels break the compiled graph wherever they dequantize an NF4 weight.

``unsloth.kernels.utils.fast_dequantize`` calls bitsandbytes' C functions through ctypes, with raw
pointers and streams kept in lists by device. Dynamo traces none of it, so every call of
``matmul_lora`` cuts the graph. 2026.10.1 has kernels that it can trace.

While compiling, the weight goes through ``bitsandbytes.functional.dequantize_4bit``, which Dynamo
can trace and which runs the same kernels. Weights of other kinds (float8, NVFP4), quantization
states in the old list format, and eager calls take the old path.

Upstream: https://github.com/unslothai/unsloth
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._pieces import in_pieces, refused
from ..edits import Rewrite
from ..patch import CannotShow, Finding, Patch

if TYPE_CHECKING:
    import torch


def traced(W: torch.Tensor, quant_state: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    """While compiling: 4-bit ``W`` dequantized, transposed if it was; else None."""
    import torch

    if not torch.compiler.is_compiling():
        return None
    from bitsandbytes.functional import QuantState, dequantize_4bit

    return dequantize_4bit(W, quant_state, out=out) if isinstance(quant_state, QuantState) else None


def defect() -> Finding:
    import torch
    from bitsandbytes.functional import quantize_4bit

    try:
        from unsloth.kernels.utils import fast_dequantize
    except (ImportError, NotImplementedError) as error:
        raise CannotShow(f"unsloth cannot be imported here: {str(error).splitlines()[0]}") from error
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, dtype=torch.bfloat16, device=device)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return x @ fast_dequantize(packed, state).t()

    x = torch.randn(2, 64, dtype=torch.bfloat16, device=device)
    return in_pieces(call, x) if device == "cuda" else refused(call, x)  # without a GPU its C functions are not there


FIND = "if quant_state is None:\n    return W"
REPLACE = """
    if quant_state is None:
        return W
    if (traced := _patches_traced(W, quant_state, out)) is not None:
        return traced
"""

PATCH = Patch(
    id="unsloth-nf4-dequantize",
    summary="torch.compile breaks at every 4-bit weight that unsloth's LoRA kernels dequantize",
    links=("https://github.com/unslothai/unsloth",),
    requires=("unsloth>=2026.9,<2026.10.1", "bitsandbytes>=0.46.1", "torch>=2.6"),
    tested_up_to="2026.9.14",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "unsloth.kernels.utils:fast_dequantize",
            find=FIND,
            replace=REPLACE,
            names={"_patches_traced": traced},
            when="unsloth<2026.9.13",
        ),
        Rewrite(  # what `fast_dequantize` calls there, once it has looked for formats of unsloth's own
            "unsloth.kernels.utils:_fast_dequantize_bnb",
            find=FIND,
            replace=REPLACE,
            names={"_patches_traced": traced},
            when="unsloth>=2026.9.13",
        ),
    ),
    defect=defect,
)
