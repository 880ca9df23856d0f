"""A forward on a CPU writes the dtype of its input into the quantization state of the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....engine import Finding, Message, Patch, Rewrite

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState


def in_dtype(state: QuantState, dtype: torch.dtype) -> QuantState:
    """Return ``state`` if it has ``dtype`` already, else a quantization state with ``dtype`` over the same tensors.

    A weight repacked for AVX512-BF16 goes to a kernel that asks for no dtype.
    """
    from bitsandbytes.functional import QuantState

    if state.dtype == dtype or getattr(state, "packing_format_for_cpu", False):
        return state
    return QuantState(
        absmax=state.absmax,
        shape=state.shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=dtype,
        offset=state.offset,
        state2=state.state2,
    )


def defect() -> Finding:
    """Run a float16 layer on a bfloat16 input, and save it."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from bitsandbytes.utils import unpack_tensor_to_dict

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").half().to("cpu")
    layer(torch.randn(2, 64, dtype=torch.bfloat16))
    saved = unpack_tensor_to_dict(layer.state_dict()["weight.quant_state.bitsandbytes__nf4"])["dtype"]
    return Finding(saved != "float16", f"a float16 weight is saved as {saved} after a bfloat16 forward")


PATCH = Patch(
    id="bitsandbytes-matmul4bit-dtype-write",
    summary="a CPU forward overwrites the dtype of the 4-bit weight: checkpoints are wrong, fullgraph fails on the first call",
    groups=("cpu", "compile", "save"),
    silent=True,
    messages=(Message("HOP: Non-nullified side effect", "torch/_dynamo/side_effects.py"),),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1917",),
    why="""
        0.49.0 added ``quant_state.dtype = A.dtype`` to ``matmul_4bit`` (CPU only), so that the weight is
        dequantized in the dtype of the input. But the quantization state belongs to the weight:

        - after one forward, ``state_dict()`` and every checkpoint record the wrong dtype;
        - ``torch.compile(fullgraph=True)`` over a checkpointed layer fails if it is the first call and the dtypes
          differ: ``HOP: Non-nullified side effect`` (#1917). After an eager call they agree, so upstream's own test
          does not see it.
    """,
    repair="""
        Upstream removed the line in 0.50.0 as dead code. On 0.49.x it is not: without it, a weight that was
        quantized from bfloat16 is dequantized in bfloat16 for a float16 input too, and the output error grows from
        2.7e-4 to 1.5e-3. The repair computes with a private ``QuantState`` over the same tensors, with the dtype of
        the input, and leaves the dtype of the weight unchanged. The results are the same bit for bit.

        If a dtype was overwritten before ``apply()``, it stays wrong, because the right one is not stored anywhere.
    """,
    requires=("bitsandbytes>=0.49,<0.50",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.autograd._functions:matmul_4bit",
            find="quant_state.dtype = A.dtype",
            replace="quant_state = _patches_in_dtype(quant_state, A.dtype)",
            names={"_patches_in_dtype": in_dtype},
        ),
    ),
    defect=defect,
)
