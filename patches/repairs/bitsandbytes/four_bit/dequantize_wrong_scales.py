"""On AVX512 CPUs, ``dequantize_4bit`` silently multiplies rows of a weight by the scales of other rows."""

from __future__ import annotations

from ....engine import CannotShow, Finding, Patch, Rewrite
from ....engine.gate import satisfied
from ....quantized.four_bit import block_scales


def defect() -> Finding:
    """Dequantize a layer of 96 inputs, and the same numbers as a matrix that is one block wide."""
    import torch
    from bitsandbytes.cextension import lib
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from bitsandbytes.nn import Linear4bit

    if satisfied("bitsandbytes>=0.49") and not lib.has_avx512f_cpu():  # older ones do not ask
        raise CannotShow("this processor has no AVX512")
    torch.manual_seed(0)
    layer = Linear4bit(96, 64, bias=False, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4")
    weight = layer.weight.data.mul_(torch.logspace(-1, 1, 64)[:, None]).clone()  # rows of all sizes, as if trained
    layer.to("cpu")
    true = dequantize_4bit(*quantize_4bit(weight.view(-1, 64), quant_type="nf4")).view(weight.shape)
    error = ((layer(torch.eye(96)).t() - true).norm() / true.norm()).item()
    return Finding(error > 1e-6, f"relative error of the output of a layer with 96 inputs {error:.2f}")


_OPERATOR = "torch.ops.bitsandbytes.dequantize_4bit.default"


def _call(function: str, width: str, blocksize: str, when: str = "") -> Rewrite:
    """Return the edit that asks in place whether a row is a multiple of a block, at a tenth of the cost of a call."""
    ours = f"(_patches_dequantize if {width} % {blocksize} else {_OPERATOR})"
    return Rewrite(function, _OPERATOR, ours, names={"_patches_dequantize": block_scales.dequantize_blocks}, when=when)


PATCH = Patch(
    id="bitsandbytes-dequantize-wrong-scales",
    summary="on AVX512 CPUs, 4-bit weights whose width is not a multiple of the block size silently get wrong scales",
    groups=("cpu", "layers"),
    silent=True,
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1789",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1828",
    ),
    why="""
        The blocks of a 4-bit weight run through the whole weight: if the length of a row is not a multiple of the
        block size, a block begins in one row and ends in the next. The kernel for processors with AVX512F, new in
        0.49.0, assumes that each row begins with a block, at scale ``row * (columns // blocksize)``. If the last
        dimension is a multiple of 16 but not of the block size, all rows after the first get wrong scales, in
        training, eval, merging, ``model.dequantize()`` and embeddings. If all rows have similar scales, the error
        grows from the 9.5 % of quantization to 30 %. If they differ, as in trained models, it is 106 %. Found with
        the second MLP layer of SigLIP so400m (width 4304) and with embeddings of width 96. AVX512-BF16 does not
        matter here. Windows is not affected, because its builds have no AVX512.

        #1828 saw the defect for block sizes of 2048 and more (rows shorter than a block) and excluded these from
        the kernel; in 0.49.x not for bfloat16.

        Upstream: #1789 (the kernel), #1828
    """,
    repair="""
        The kernel is right if a row is one block. So the repair tells it that the weight has such rows: the same
        numbers in the same order, at the same speed. If the last block is not complete, it tells the kernel that
        the weight is one long row, which one thread computes. Only wrong results change. The repair covers
        ``dequantize_4bit`` and the product on CPUs (``gemm_4bit``, 0.50), which all of the above use. A direct call
        of ``torch.ops.bitsandbytes.dequantize_4bit`` stays as it was.
    """,
    requires=("bitsandbytes>=0.49",),
    tested_up_to="0.50.2",
    edits=(
        _call("bitsandbytes.functional:dequantize_4bit", "quant_state.shape[-1]", "quant_state.blocksize"),
        _call(
            "bitsandbytes.backends.default.ops:_gemm_4bit_default_impl",
            "shapeB[-1]",
            "blocksize",
            when="bitsandbytes>=0.50",
        ),
    ),
    defect=defect,
)
