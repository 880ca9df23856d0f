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


_RETURN_PLAIN = "if quant_state is None:\n    return W"
_RETURN_TRACED = "if (traced := _patches_traced(W, quant_state, out)) is not None:\n    return traced"


def _trace(function: str, find: str, replace: str, when: str = "") -> Rewrite:
    return Rewrite(function, find, replace, names={"_patches_traced": dequantize_if_traced}, when=when)


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
        ``axolotl.kernels.quantize.dequantize`` and ``unsloth.kernels.utils.fast_dequantize`` call C functions of
        bitsandbytes through ctypes, with raw pointers. Dynamo can trace neither: each pointer breaks the graph, and
        ``get_ptr`` is compiled again for every shape. unsloth also keeps streams in lists by device, so every call of
        ``matmul_lora`` breaks the graph.

        axolotl's ``kernels.lora`` and ``kernels.dora`` import the function under the same name. Affects double-quantized
        weights on axolotl up to 0.17; 0.18 has an operator for this. unsloth 2026.10.1 has kernels that Dynamo can
        trace.
    """,
    repair="""
        While compiling, the repair dequantizes with ``bitsandbytes.functional.dequantize_4bit``, which Dynamo can
        trace and which runs the same kernels: one graph, and bit-equal results. Other weights (float8, NVFP4),
        quantization states in the old list format, and eager calls take the old path.
    """,
    former_ids=("unsloth-nf4-dequantize",),
    parts=(
        Part(
            "axolotl",
            ("axolotl>=0.16,<0.18", "bitsandbytes>=0.46.1", "torch>=2.6"),
            "0.17.0",
            (
                _trace(
                    "axolotl.kernels.quantize:dequantize",
                    "target_device = W.device",
                    f"{_RETURN_TRACED}\ntarget_device = W.device",
                ),
            ),
            defect_axolotl,
        ),
        Part(
            "unsloth",
            ("unsloth>=2026.9,<2026.10.1", "bitsandbytes>=0.46.1", "torch>=2.6"),
            "2026.9.14",
            tuple(
                _trace(f"unsloth.kernels.utils:{name}", _RETURN_PLAIN, f"{_RETURN_PLAIN}\n{_RETURN_TRACED}", when)
                for name, when in (
                    ("fast_dequantize", "unsloth<2026.9.13"),
                    # `fast_dequantize` calls it there, once it has looked for formats of unsloth's own
                    ("_fast_dequantize_bnb", "unsloth>=2026.9.13"),
                )
            ),
            defect_unsloth,
        ),
    ),
)
