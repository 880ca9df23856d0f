"""INT8 backward reads the layer as it is then, not as it was in forward.

``MatMul8bitLt`` and ``MatMul8bitFp`` keep the layer's ``MatmulLtState`` on ``ctx`` and read its
codes (``CB``) and row scales (``SCB``) in backward. Whatever happened to the layer in between
reaches the gradients: accelerate's offload hook clears ``state.SCB`` after every forward, so each
backward through an offloaded INT8 layer dies with ``'NoneType' object has no attribute
'unsqueeze'``; a second forward with other weights before the first backward gives wrong
gradients; saved-tensor hooks (``save_on_cpu``, non-reentrant checkpointing) see none of it, so
that checkpointing keeps every input alive.

Upstream: #1927 (offload), #2034 (``save_for_backward``). All releases from 0.46.1.

The repair: forward hands codes and scales, and the input only if the weight itself is trained, to
``ctx.save_for_backward``; backward takes them from there, once. Nothing is copied: what is saved
is the tensor that forward used, and for a quantized layer it shares the version counter of the
weight parameter, so that refilling the weight in place raises torch's own error. ``nn.Linear``
does the same.

Once checkpointing unpacks what was saved, a second habit shows: off CUDA, ``int8_vectorwise_quant``
sets outliers of a float16 input to zero and puts them back, so that torch believes the input was
modified and refuses backward. It gets the same memory under a version counter of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ....engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    from torch import Tensor


def _keep(ctx: Any, B: Tensor, state: Any, *operands: Tensor | None) -> None:
    """Save what backward needs: codes and scales for the input's gradient, operands for the weight's."""
    need_input, need_weight = ctx.needs_input_grad[:2]
    ctx.threshold = state.threshold
    codes = _codes(B, state.CB) if need_input else None
    ctx.save_for_backward(codes, state.SCB if need_input else None, *(o if need_weight else None for o in operands))


def _codes(B: Tensor, CB: Tensor) -> Tensor:
    """``CB``, or the same codes seen through the weight, whose version counter tells of a refill."""
    import torch

    if torch.compiler.is_compiling() or B.dtype != torch.int8 or B.data_ptr() != CB.data_ptr():
        return CB
    return B.detach()


def _half(A: Tensor) -> Tensor:
    """``A`` in float16, for a kernel that writes to it and undoes that."""
    import torch

    half = A.to(torch.float16)
    return half if torch.compiler.is_compiling() else half.data


class _Weight(NamedTuple):
    """The part of ``MatmulLtState`` that backward reads, as it was in forward."""

    CB: Tensor | None
    SCB: Tensor | None
    threshold: float


class _Saved(NamedTuple):
    state: _Weight
    operands: tuple[Tensor | None, ...]


def _recall(ctx: Any) -> _Saved:
    """What ``_keep`` saved. Unpacks once, as saved-tensor hooks demand."""
    if not any(ctx.needs_input_grad[:2]):  # the bias alone is trained
        return _Saved(_Weight(None, None, 0.0), (None,) * 5)
    CB, SCB, *operands = ctx.saved_tensors
    return _Saved(_Weight(CB, SCB, ctx.threshold), tuple(operands))


_NAMES = {"_patches_keep": _keep, "_patches_recall": _recall, "_patches_half": _half}
_LT = "bitsandbytes.autograd._functions:MatMul8bitLt"
_FP = "bitsandbytes.autograd._functions:MatMul8bitFp"
_SINCE_FP = "bitsandbytes>=0.47"


def defect() -> Finding:
    """Two forwards with accelerate's offload hook between forward and backward."""
    import bitsandbytes as bnb
    import torch
    from accelerate import cpu_offload

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()
    weight = layer.weight.data.float() * layer.weight.SCB.float().view(-1, 1) / 127
    cpu_offload(layer, execution_device=torch.device("cpu"))
    x = torch.randn(4, 64, requires_grad=True)
    y = layer(x)
    try:
        y.sum().backward()
    except AttributeError as error:
        return Finding(True, f"backward of an offloaded layer: {error}")
    expected = weight.sum(0).expand_as(x)
    error = float((x.grad - expected).norm() / expected.norm())
    return Finding(error > 1e-2, f"relative error of the gradient {error:.1e}")


PATCH = Patch(
    id="bitsandbytes-int8-backward-live-state",
    summary="INT8 backward reads live layer state: offloaded layers crash, hooks and checkpointing see nothing",
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034",
    ),
    requires=("bitsandbytes>=0.46.1", "accelerate"),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(f"{_LT}.forward", "A.to(torch.float16)", "_patches_half(A)", count=2),
        Rewrite(f"{_LT}.forward", "ctx.state = state", ""),
        Rewrite(
            f"{_LT}.forward",
            "ctx.tensors = (CAt, subA, A)",
            "_patches_keep(ctx, B, state, CAt, subA, None, SCAt, state.idx)",
            names=_NAMES,
        ),
        Rewrite(f"{_LT}.forward", "ctx.tensor_states = (SCAt, state.idx)", ""),
        Rewrite(f"{_LT}.backward", "ctx.tensors", "(_patches_saved := _patches_recall(ctx)).operands[:3]"),
        Rewrite(f"{_LT}.backward", "ctx.tensor_states", "_patches_saved.operands[3:]"),
        Rewrite(f"{_LT}.backward", "ctx.state", "_patches_saved.state"),
        Rewrite(f"{_FP}.forward", "ctx.state = state", "_patches_keep(ctx, B, state, A)", names=_NAMES, when=_SINCE_FP),
        Rewrite(f"{_FP}.forward", "ctx.A = A", "", when=_SINCE_FP),
        Rewrite(
            f"{_FP}.backward", "ctx.A", "(_patches_saved := _patches_recall(ctx)).operands[0]", when=_SINCE_FP
        ),
        Rewrite(f"{_FP}.backward", "ctx.state", "_patches_saved.state", when=_SINCE_FP),
    ),
    defect=defect,
)
