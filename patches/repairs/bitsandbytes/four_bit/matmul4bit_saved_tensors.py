"""``MatMul4Bit`` hides from autograd what its backward needs.

In every release its forward puts the packed weight on ``ctx`` as a plain attribute, and backward reads
the statistics from the live ``QuantState``. So saved-tensor hooks (``save_on_cpu``, offloading, non-
reentrant checkpointing) never see them, and a weight whose buffer is written again between forward and
backward (streaming of layers through one buffer) gives a wrong gradient without an error. (#2034)

The repair saves weight and statistics with ``ctx.save_for_backward``: hooks see them, and torch's own
version check raises on a recycled buffer. References are kept, nothing is copied. Tensors made in
inference mode cannot be saved so; they stay on ``ctx``, as before.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

_FUNCTION = "bitsandbytes.autograd._functions:MatMul4Bit"


def save(ctx: Any, weight: torch.Tensor, state: QuantState) -> None:
    """Save ``weight`` and the tensors of ``state`` on ``ctx``."""
    import torch

    tensors = (weight, state.absmax, state.code)
    if state.nested:
        tensors += (state.offset, state.state2.absmax, state.state2.code)
    ctx.kept = None
    if not torch.compiler.is_compiling() and any(t is not None and t.is_inference() for t in tensors):
        ctx.kept = tensors
    else:
        ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[torch.Tensor, QuantState]:
    """The weight, and its state with the tensors that were saved."""
    from bitsandbytes.functional import QuantState

    state = ctx.state
    tensors = ctx.saved_tensors if ctx.kept is None else ctx.kept
    weight, absmax, code = tensors[:3]
    fields = {"shape": state.shape, "blocksize": state.blocksize, "quant_type": state.quant_type}
    if state.nested:
        offset, nested_absmax, nested_code = tensors[3:]
        nested = QuantState(
            nested_absmax, code=nested_code, blocksize=state.state2.blocksize, dtype=state.state2.dtype
        )
        fields.update(offset=offset, state2=nested)
    return weight, QuantState(absmax, code=code, dtype=state.dtype, **fields)


def defect() -> Finding:
    """Run a layer under saved-tensor hooks, then write the next weight into its buffer before backward."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer, other = (
        Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
        for _ in range(2)
    )
    x = torch.randn(2, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)

    seen = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += tensor.nbytes if tensor.data_ptr() == layer.weight.data_ptr() else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        layer(x)
    out = layer(x).sum()
    with torch.no_grad():
        layer.weight.copy_(other.weight)
    try:
        (gradient,) = torch.autograd.grad(out, x)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        recycled = "torch's error"
    else:
        recycled = f"gradient off by {((gradient - expected).norm() / expected.norm()).item():.2f}, no error"
    figure = f"hooks see {seen} of {layer.weight.nbytes} bytes of the weight; buffer reused: {recycled}"
    return Finding(seen < layer.weight.nbytes or "off" in recycled, figure)


PATCH = Patch(
    id="bitsandbytes-matmul4bit-saved-tensors",
    summary="saved-tensor hooks do not see 4-bit weights, and a reused weight buffer gives wrong gradients",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            f"{_FUNCTION}.forward",
            "ctx.tensors = (None, B)",
            "_patches_save(ctx, B, quant_state)",
            names={"_patches_save": save},
        ),
        # Left of the original: ``ctx.tensors`` in the branch where backward needs neither.
        Rewrite(
            f"{_FUNCTION}.backward",
            "_, B = ctx.tensors",
            "B, _patches_state = _patches_saved(ctx) if ctx.needs_input_grad[0] else (None, None)",
            names={"_patches_saved": saved},
        ),
        Rewrite(f"{_FUNCTION}.backward", "ctx.state", "_patches_state"),
    ),
    defect=defect,
)
