"""unsloth's LoRA kernels break the compiled graph wherever they dequantize an NF4 weight.

``unsloth.kernels.utils.fast_dequantize`` calls C functions of bitsandbytes through ctypes, with raw pointers and with
streams in lists by device. Dynamo can trace none of this, so every call of ``matmul_lora`` breaks the graph. 2026.10.1
has kernels that it can trace.

While compiling, the repair dequantizes with ``bitsandbytes.functional.dequantize_4bit``, which Dynamo can trace and
which runs the same kernels. Other weights (float8, NVFP4), quantization states in the old list format, and eager calls
take the old path.

Upstream: https://github.com/unslothai/unsloth
"""

from __future__ import annotations

from ...engine import CannotShow, Finding, Patch, Rewrite
from ...quantized.four_bit.ctypes_dequantize import dequantize_if_traced
from ..reproducers.graphs import show_dequantize_graphs


def defect() -> Finding:
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
    id="unsloth-nf4-dequantize",
    summary="torch.compile breaks the graph at every 4-bit weight that unsloth's LoRA kernels dequantize",
    links=("https://github.com/unslothai/unsloth",),
    requires=("unsloth>=2026.9,<2026.10.1", "bitsandbytes>=0.46.1", "torch>=2.6"),
    tested_up_to="2026.9.14",
    seen_on=("2.13",),
    edits=(
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
    defect=defect,
)
