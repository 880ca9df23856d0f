"""LoRA kernels of axolotl and unsloth break the compiled graph wherever they dequantize an NF4 weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Part, Patch, Rewrite
from ..reproducers.graphs import show_dequantize_graphs

if TYPE_CHECKING:
    import torch


def dequantize_if_traced(W: torch.Tensor, quant_state: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    """Return 4-bit ``W`` dequantized, transposed if it was, while torch.compile traces; else None.

    None too for a ``quant_state`` that is not a ``QuantState``: the old list format, or another kind of weight.
    """
    import torch

    if not torch.compiler.is_compiling():
        return None
    from bitsandbytes.functional import QuantState, dequantize_4bit

    return dequantize_4bit(W, quant_state, out=out) if isinstance(quant_state, QuantState) else None


def defect_axolotl() -> Finding:
    from axolotl.kernels.quantize import dequantize

    return show_dequantize_graphs(dequantize)


def defect_unsloth() -> Finding:
    try:
        from unsloth.kernels.utils import fast_dequantize
    except (ImportError, NotImplementedError) as error:
        raise CannotShow(f"unsloth cannot be imported here: {str(error).splitlines()[0]}") from error
    return show_dequantize_graphs(fast_dequantize)


FIND = "if quant_state is None:\n    return W"


REPLACE = """
    if quant_state is None:
        return W
    if (traced := _patches_traced(W, quant_state, out)) is not None:
        return traced
"""


PATCH = Patch(
    id="axolotl-nf4-dequantize",
    summary="torch.compile breaks the graph at every 4-bit weight that LoRA kernels of axolotl or unsloth dequantize",
    groups=("compile",),
    silent=True,
    words=("graph break",),
    links=(
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3677",
        "https://github.com/unslothai/unsloth",
    ),
    why="""
        axolotl's LoRA kernels break the compiled graph wherever they dequantize an NF4 weight.
        ``axolotl.kernels.quantize.dequantize`` calls C functions of bitsandbytes through ctypes, with raw pointers.
        Dynamo can trace neither: each pointer breaks the graph, and ``get_ptr`` is compiled again for every shape.
        ``kernels.lora`` and ``kernels.dora`` import the function under the same name. Affects double-quantized
        weights on axolotl up to 0.17; 0.18 has an operator for this.

        unsloth's LoRA kernels break the compiled graph wherever they dequantize an NF4 weight.
        ``unsloth.kernels.utils.fast_dequantize`` calls C functions of bitsandbytes through ctypes, with raw
        pointers and with streams in lists by device. Dynamo can trace none of this, so every call of
        ``matmul_lora`` breaks the graph. 2026.10.1 has kernels that it can trace.
    """,
    repair="""
        While compiling, the repair dequantizes with ``bitsandbytes.functional.dequantize_4bit``, which Dynamo can
        trace and which runs the same kernels: one graph, and bit-equal results. Quantization states in the old list
        format, and eager calls, take the old path.

        While compiling, the repair dequantizes with ``bitsandbytes.functional.dequantize_4bit``, which Dynamo can
        trace and which runs the same kernels. Other weights (float8, NVFP4), quantization states in the old list
        format, and eager calls take the old path.
    """,
    former_ids=("unsloth-nf4-dequantize",),
    parts=(
        Part(
            "axolotl",
            ("axolotl>=0.16,<0.18", "bitsandbytes>=0.46.1", "torch>=2.6"),
            "0.17.0",
            (
                Rewrite(
                    "axolotl.kernels.quantize:dequantize",
                    find="target_device = W.device",
                    replace="""
                if (traced := _patches_traced(W, quant_state, out)) is not None:
                    return traced
                target_device = W.device
            """,
                    names={"_patches_traced": dequantize_if_traced},
                ),
            ),
            defect_axolotl,
        ),
        Part(
            "unsloth",
            ("unsloth>=2026.9,<2026.10.1", "bitsandbytes>=0.46.1", "torch>=2.6"),
            "2026.9.14",
            (
                Rewrite(
                    "unsloth.kernels.utils:fast_dequantize",
                    find=FIND,
                    replace=REPLACE,
                    names={"_patches_traced": dequantize_if_traced},
                    when="unsloth<2026.9.13",
                ),
                Rewrite(  # what `fast_dequantize` calls there, once it has looked for formats of unsloth's own
                    "unsloth.kernels.utils:_fast_dequantize_bnb",
                    find=FIND,
                    replace=REPLACE,
                    names={"_patches_traced": dequantize_if_traced},
                    when="unsloth>=2026.9.13",
                ),
            ),
            defect_unsloth,
        ),
    ),
)
