"""``Linear8bitLt(has_fp16_weights=True)``, the default, cannot be trained on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import CannotShow, Finding, Message, Patch, Rewrite
from ....engine.gate import satisfied

if TYPE_CHECKING:
    from torch import Tensor


def _trains_on_cpu(A: Tensor, B: Tensor, state: Any) -> bool:
    """Tell whether ``MatMul8bitLt`` would need the kernel that the CPU lacks."""
    return A.device.type == "cpu" and state.has_fp16_weights and B.requires_grad


def defect() -> Finding:
    """Make a training step on (batch, sequence, features), then evaluate."""
    import bitsandbytes as bnb
    import torch

    if not satisfied("bitsandbytes>=0.48"):
        raise CannotShow("before 0.48, no CPU kernel trains such a weight in any shape")
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32).to("cpu")
    x = torch.randn(2, 3, 64)
    try:
        layer(x).sum().backward()
        layer.eval()(x)
    except (RuntimeError, NotImplementedError) as error:
        return Finding(True, f"{type(error).__name__}: {str(error)[:70]}")
    expected = x.flatten(0, 1).sum(0).expand(32, 64)
    off = float((layer.weight.grad - expected).norm() / expected.norm())
    return Finding(off > 1e-2, f"relative error of the weight gradient {off:.1e}")


PATCH = Patch(
    id="bitsandbytes-int8-fp16-weights-cpu",
    summary="on a CPU has_fp16_weights=True neither trains on 3-D inputs nor evaluates",
    groups=("cpu", "train"),
    messages=(Message("t() expects a tensor with <= 2 dimensions, but self is 3D", "figure"),),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``MatMul8bitFp.backward`` transposes the input with ``A.t()``, which refuses the 3-D inputs of transformers:
        ``t() expects a tensor with <= 2 dimensions, but self is 3D``. In eval mode, forward uses ``MatMul8bitLt``,
        whose ``int8_double_quant`` has no CPU kernel, so evaluation between training steps fails too. From 0.48 on;
        earlier releases do not support such weights on a CPU.
    """,
    repair="""
        The repair flattens the leading dimensions, as ``MatMul8bitLt`` does, and uses the path that exists on a CPU
        whenever the weight needs a gradient.
    """,
    requires=("bitsandbytes>=0.48",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite("bitsandbytes.autograd._functions:MatMul8bitFp.backward", "A.t()", "A.reshape(-1, A.shape[-1]).t()"),
        Rewrite(
            "bitsandbytes.autograd._functions:matmul",
            "state.is_training",
            "state.is_training or _patches_trains_on_cpu(A, B, state)",
            names={"_patches_trains_on_cpu": _trains_on_cpu},
        ),
    ),
    defect=defect,
)
