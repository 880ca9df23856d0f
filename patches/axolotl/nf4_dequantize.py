"""axolotl's LoRA kernels break the compiled graph wherever they dequantize an NF4 weight.

``axolotl.kernels.quantize.dequantize`` calls bitsandbytes' C functions through ctypes, with raw
pointers. Dynamo traces neither: a break for each pointer, and ``get_ptr`` is compiled again for
every shape. ``kernels.lora`` and ``kernels.dora`` have copies of the name. Hits doubly quantized
weights, on releases up to 0.17; 0.18 has an operator.

While compiling, the weight goes through ``bitsandbytes.functional.dequantize_4bit``, which Dynamo
can trace and which runs the same kernels: one graph, bit-equal. A quantization state in the old
list format, and eager calls, take the old path.

Upstream: https://github.com/axolotl-ai-cloud/axolotl/pull/3677
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._pieces import in_pieces, refused
from ..edits import Rewrite
from ..patch import Finding, Patch

if TYPE_CHECKING:
    import torch


def traced(W: torch.Tensor, quant_state: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    """While compiling: ``W`` dequantized, transposed if it was; else None."""
    import torch

    if not torch.compiler.is_compiling() or isinstance(quant_state, list):
        return None
    import bitsandbytes as bnb

    return bnb.functional.dequantize_4bit(W, quant_state, out=out)


def defect() -> Finding:
    import torch
    from axolotl.kernels.quantize import dequantize
    from bitsandbytes.functional import quantize_4bit

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, dtype=torch.bfloat16, device=device)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return x @ dequantize(packed, state).t()

    x = torch.randn(2, 64, dtype=torch.bfloat16, device=device)
    return in_pieces(call, x) if device == "cuda" else refused(call, x)  # without a GPU its C functions are not there


PATCH = Patch(
    id="axolotl-nf4-dequantize",
    summary="torch.compile breaks at every 4-bit weight that axolotl's LoRA kernels dequantize",
    links=("https://github.com/axolotl-ai-cloud/axolotl/pull/3677",),
    requires=("axolotl>=0.16,<0.18", "bitsandbytes>=0.46.1", "torch>=2.6"),
    tested_up_to="0.17.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "axolotl.kernels.quantize:dequantize",
            find="target_device = W.device",
            replace="""
                if (traced := _patches_traced(W, quant_state, out)) is not None:
                    return traced
                target_device = W.device
            """,
            names={"_patches_traced": traced},
        ),
    ),
    defect=defect,
)
