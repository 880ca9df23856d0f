"""A compiled 4-bit model is compiled again in every process, because its graphs are not cached on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite
from ....process import tracing

if TYPE_CHECKING:
    import torch


def apply(function: Any, A: torch.Tensor, B: torch.Tensor, out: Any, bias: Any, quant_state: Any) -> torch.Tensor:
    """While tracing, compute ``MatMul4Bit.apply(A, B, out, bias, quant_state)``, or the operator for it."""
    import torch

    if out is not None or not tracing.for_this_process():
        output: torch.Tensor = function.apply(A, B, out, bias, quant_state)
        return output
    from ....operators import linear_4bit

    nested = None, None, None, 0, torch.float32
    if quant_state.nested:
        second = quant_state.state2
        nested = quant_state.offset, second.absmax, second.code, second.blocksize, second.dtype
    return linear_4bit.OPERATOR(
        A,
        B,
        bias,
        quant_state.absmax,
        quant_state.shape,
        quant_state.dtype,
        quant_state.blocksize,
        quant_state.quant_type,
        *nested,
    )


def defect() -> Finding:
    """Compile a layer, and ask torch whether it can store the graph."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

    reasons: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        try:
            check_cacheable(graph)
        except BypassAOTAutogradCache as error:
            reasons.append(" ".join(str(error).split()))
        return graph.forward

    layer: torch.nn.Module = Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    torch.compiler.reset()
    torch.compile(layer, backend=backend)(torch.randn(2, 64, requires_grad=True))
    torch.compiler.reset()
    return Finding(bool(reasons), reasons[0][:90] if reasons else "the cache on disk accepts the graph")


_CALL = "MatMul4Bit.apply(A, B, out, bias, quant_state)"
_REPLACEMENT = f"""(
    _patches_linear_4bit(MatMul4Bit, A, B, out, bias, quant_state) if torch.compiler.is_dynamo_compiling() else {_CALL}
)"""

PATCH = Patch(
    id="bitsandbytes-matmul4bit-aot-cache",
    summary="compiled 4-bit models are recompiled in every process: the cache on disk does not accept their graphs",
    groups=("compile",),
    silent=True,
    messages=(Message("Unsupported call_function target autograd_function_apply", "figure"),),
    words=("recompile",),
    links=("https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html",),
    why="""
        torch stores on disk what AOT autograd makes of a graph, for the next process. It does not store graphs that
        contain a custom ``autograd.Function``, because the graph does not show what that does, and ``MatMul4Bit``
        is one. So every start of a training run traces and lowers the whole forward and backward again. All
        releases.
    """,
    repair="""
        While compiling, the repair makes the product an operator, ``bnb_patches::linear_4bit``, whose arguments are
        the parts of the quantization state. AOT autograd expands it into ``MatMul4Bit`` with the same quantization
        state. So lowering, the tensors saved for backward and every bit of the result stay the same; only the graph
        that is looked up in the cache contains an operator instead. The operator's name contains a digest of the
        code that it expands to, so that an upgrade of either package does not find old graphs
        (``operators/code_digest.py``). Eager calls take the old path, and so does torch.export, whose programs are
        loaded where the operator does not exist.
    """,
    requires=("bitsandbytes>=0.46.1", "torch>=2.7"),
    tested_up_to="0.50.2",
    edits=tuple(
        Rewrite(
            "bitsandbytes.autograd._functions:matmul_4bit",
            _CALL,
            _REPLACEMENT,
            count=count,
            names={"_patches_linear_4bit": apply},
            when=f"bitsandbytes{when}",
        )
        for count, when in (
            (2, "<0.47"),
            (3, ">=0.47,<0.48"),
            (2, ">=0.48,<0.49"),
            (3, ">=0.49,<0.50"),
            (1, ">=0.50"),
        )
    ),
    defect=defect,
)
