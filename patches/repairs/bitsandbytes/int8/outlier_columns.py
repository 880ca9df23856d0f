"""torch.compile breaks the graph at every INT8 layer that has a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite
from ....process import tracing
from ....quantized.int8 import row_scales
from ...reproducers.graphs import show_graphs

if TYPE_CHECKING:
    import torch


def traced(function: Any, A: torch.Tensor, B: torch.Tensor, out: Any, bias: Any, state: Any) -> torch.Tensor:
    """While tracing, compute ``function.apply(A, B, out, bias, state)``, or the operator that stands for it."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if id(function) == id(MatMul8bitLt):  # Dynamo cannot compare two Functions with `is`
        return traced_lt(A, B, out, bias, state)
    output: torch.Tensor = function.apply(A, B, out, bias, state)
    return output


def traced_lt(A: torch.Tensor, B: torch.Tensor, out: Any, bias: Any, state: Any) -> torch.Tensor:
    """Do the same for ``MatMul8bitLt``, also where Dynamo is too old to be asked which function it has."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if out is None and tracing.for_this_process() and _fits(A, state):
        from ....operators import int8_linear

        return int8_linear.OPERATOR(A, *row_scales.pair_of_product(state), bias, float(state.threshold))
    output: torch.Tensor = MatMul8bitLt.apply(A, B, out, bias, state)
    return output


def _fits(A: torch.Tensor, state: Any) -> bool:
    packed, scale = row_scales.pair_of_product(state)
    if state.has_fp16_weights or packed is None or scale is None:
        return False
    return state.threshold > 0.0 and A.dim() >= 2


def defect() -> Finding:
    """Compile a layer with a threshold that has run once."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(32, 16, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    x = torch.randn(4, 32)
    x[:, 3] *= 20
    layer(x)  # so that the columns are all that breaks the graph, not the state that the first call writes
    # Not fullgraph=True: that alone turns capture_dynamic_output_shape_ops on in newer torch.
    return show_graphs(layer, x)


def _while_tracing(function: str, replacement: str, ours: Any, when: str) -> Rewrite:
    """Return the edit that computes a product of ``function`` by ``ours``, which ``replacement`` calls, in a trace."""
    call = f"{function}.apply(A, B, out, bias, state)"
    replace = f"({replacement} if torch.compiler.is_dynamo_compiling() else {call})"
    names = {replacement.partition("(")[0]: ours}
    return Rewrite("bitsandbytes.autograd._functions:matmul", call, replace, names=names, when=when)


PATCH = Patch(
    id="bitsandbytes-int8-outlier-columns",
    summary="torch.compile breaks the graph at every INT8 layer that has a threshold",
    groups=("compile",),
    messages=(
        Message(
            "Operator `bitsandbytes.int8_vectorwise_quant.default`'s output shape depends on input Tensor data.",
            "torch/_dynamo/utils.py",
            parts=("Operator `bitsandbytes.int8_",),
            holds=("'s output shape depends on input Tensor data.",),
        ),
    ),
    words=("graph break",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2044",),
    why="""
        transformers loads INT8 models with ``llm_int8_threshold=6.0``. ``MatMul8bitLt`` then looks for activation
        columns above the threshold. Their number depends on the data, so Dynamo cannot give
        ``int8_vectorwise_quant`` and ``int8_mixed_scaled_mm`` a shape and breaks the graph. A model of 3 layers
        becomes 35 graphs. With gradient checkpointing no decoder layer compiles, and a compiled step needs more
        time than an eager one. Affects training on a GPU, and eval on every device.
        ``capture_dynamic_output_shape_ops`` does not help: with checkpointing it makes Dynamo fail. All releases.
    """,
    repair="""
        While compiling, the repair makes the layer one operator, ``bnb_patches::int8_linear_…``, whose output shape
        does not depend on the data. It calls the same two kernels in the same order, and its backward rounds as
        ``MatMul8bitLt.backward`` does, so forward and backward are bit-equal to eager. It takes only quantized
        weights with a threshold and inputs of two or more dimensions. Eager calls take the old path, and so does
        torch.export, whose programs are loaded where the operator does not exist.
    """,
    requires=("bitsandbytes>=0.46.1", "torch>=2.8"),
    tested_up_to="0.50.2",
    edits=(
        _while_tracing(
            "MatMul8bitLt", "_patches_int8_traced_as(MatMul8bitLt, A, B, out, bias, state)", traced, "torch>=2.13"
        ),
        _while_tracing("MatMul8bitLt", "_patches_int8_traced_lt(A, B, out, bias, state)", traced_lt, "torch<2.13"),
        _while_tracing(
            "MatMul8bitFp",
            "_patches_int8_traced_as(MatMul8bitFp, A, B, out, bias, state)",
            traced,
            "bitsandbytes>=0.47 and torch>=2.13",
        ),
    ),
    defect=defect,
)
