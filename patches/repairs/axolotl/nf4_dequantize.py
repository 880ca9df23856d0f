"""axolotl's LoRA kernels break the compiled graph wherever they dequantize an NF4 weight.

``axolotl.kernels.quantize.dequantize`` calls C functions of bitsandbytes through ctypes, with raw pointers. Dynamo can
trace neither: each pointer breaks the graph, and ``get_ptr`` is compiled again for every shape. ``kernels.lora`` and
``kernels.dora`` import the function under the same name. Affects double-quantized weights on axolotl up to 0.17; 0.18
has an operator for this.

While compiling, the repair dequantizes with ``bitsandbytes.functional.dequantize_4bit``, which Dynamo can trace and
which runs the same kernels: one graph, and bit-equal results. Quantization states in the old list format, and eager
calls, take the old path.

Upstream: https://github.com/axolotl-ai-cloud/axolotl/pull/3677
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...quantized.four_bit.ctypes_dequantize import dequantize_if_traced
from ..reproducers.graphs import show_dequantize_graphs


def defect() -> Finding:
    from axolotl.kernels.quantize import dequantize

    return show_dequantize_graphs(dequantize)


PATCH = Patch(
    id="axolotl-nf4-dequantize",
    summary="torch.compile breaks the graph at every 4-bit weight that axolotl's LoRA kernels dequantize",
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
            names={"_patches_traced": dequantize_if_traced},
        ),
    ),
    defect=defect,
)
