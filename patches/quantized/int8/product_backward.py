"""The backward of an INT8 product reads the weights and scales that its forward used, not what the layer holds by then.

The edits of ``bitsandbytes-int8-backward-live-state``. On 0.48.0 and 0.48.1 an offloaded layer raises an error in forward. Whatever
repairs this there has these edits too: else its backward would raise a less clear one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine import Rewrite
from .. import saved_for_backward
from ..saved_for_backward import onloaded, parameter_classes
from . import row_scales

if TYPE_CHECKING:
    from torch import Tensor

_ELSEWHERE: Any = saved_for_backward.SavedElsewhere("bitsandbytes-int8-backward-live-state")


class _Weight(NamedTuple):
    """The part of ``MatmulLtState`` that backward reads, as it was in forward."""

    CB: Tensor | None
    SCB: Tensor | None
    threshold: float


class _Kept(NamedTuple):
    """The attributes of ``ctx`` that backward reads."""

    state: _Weight
    tensors: tuple[Tensor | None, ...] = (None, None, None)
    tensor_states: tuple[Tensor | None, ...] = (None, None)
    A: Tensor | None = None


_UNNEEDED = _Kept(_Weight(None, None, 0.0))


def _keep(ctx: Any, B: Tensor, state: Any, CAt: Any, subA: Any, SCAt: Any, idx: Any, A: Any) -> None:
    """Keep for backward the weight ``B`` of ``state``, by reference if it is resident; else save it with autograd.

    If the weight is trained, the tensors that its gradient needs are saved in any case.
    """
    needs = ctx.needs_input_grad
    # Packed weights of a floating-point weight belong to no parameter.
    if (
        needs[1]
        or state.has_fp16_weights
        or ((onloaded or type(B) not in parameter_classes) and not saved_for_backward.is_resident(B))
    ):
        _save(ctx, B, state, CAt, subA, SCAt, idx, A)
        return
    ctx.state, ctx.tensors, ctx.tensor_states, ctx.A = state, _UNNEEDED.tensors, _UNNEEDED.tensor_states, None
    if needs[0]:
        CB, SCB = row_scales.read_pair(state)
        try:
            ctx._patches_noted = CB, SCB, B, CB._version, SCB._version, B._version
        except RuntimeError:  # made in inference mode: there torch does not count
            ctx._patches_noted = CB, SCB, B, None, None, None


def _save(ctx: Any, B: Tensor, state: Any, CAt: Any, subA: Any, SCAt: Any, idx: Any, A: Any) -> None:
    """Save packed weights and scales of ``state``, and the rest if the weight is trained, where hooks see them.

    A trace always does: it keeps nothing by reference.
    """
    CB, SCB = row_scales.pair_of_product(state) if ctx.needs_input_grad[0] else (None, None)
    if not ctx.needs_input_grad[1]:
        CAt = subA = SCAt = idx = A = None
    ctx._patches_noted = None
    ctx._patches_saved = saved_for_backward.is_savable(CB, SCB, CAt, subA, SCAt, idx, A)
    if ctx._patches_saved:
        ctx.save_for_backward(_through_weight(B, CB), SCB, CAt, subA, SCAt, idx, A)
        ctx.state = ctx.tensors = ctx.tensor_states = ctx.A = _ELSEWHERE
        ctx.threshold = state.threshold
    else:
        ctx.state = _Weight(CB, SCB, state.threshold)
        ctx.tensors, ctx.tensor_states, ctx.A = (CAt, subA, A), (SCAt, idx), A


def _through_weight(B: Tensor, CB: Tensor | None) -> Tensor | None:
    """Return ``CB``, or the same memory as a view of the weight, whose version counter tells of a refill."""
    import torch

    if CB is None or torch.compiler.is_compiling() or B.dtype != torch.int8 or B.data_ptr() != CB.data_ptr():
        return CB
    return B.detach()


def _recall(ctx: Any) -> Any:
    """Return an object with ``state``, ``tensors``, ``tensor_states`` and ``A`` of forward: ``ctx``, if it has them."""
    needs = ctx.needs_input_grad
    if not (needs[0] or needs[1]):  # the bias alone is trained
        return _UNNEEDED
    noted = getattr(ctx, "_patches_noted", None)
    if noted is None:
        if not getattr(ctx, "_patches_saved", False):  # a forward without the patch, or one that left it all on ctx
            return ctx
        CB, SCB, CAt, subA, SCAt, idx, A = ctx.saved_tensors  # once, as saved-tensor hooks demand
        return _Kept(_Weight(CB, SCB, ctx.threshold), (CAt, subA, A), (SCAt, idx), A)
    CB, SCB, B, version, scales_version, weight_version = noted
    if version is not None and (CB._version != version or SCB._version != scales_version):
        saved_for_backward.raise_version_error((CB, SCB), (version, scales_version))
    # Written to through the weight, if that is the same memory by now.
    if version is not None and B._version != weight_version and B.data_ptr() == CB.data_ptr():
        saved_for_backward.raise_version_error((B,), (weight_version,))
    state = ctx.state
    CB_now, SCB_now = row_scales.read_pair(state)
    if CB_now is CB and SCB_now is SCB:
        return ctx
    return _Kept(_Weight(CB, SCB, state.threshold))


def _half(A: Tensor) -> Tensor:
    """Return ``A`` in float16, for a kernel that writes to it and undoes that."""
    import torch

    half = A.to(torch.float16)
    return half.data if A.dtype == torch.float16 and not torch.compiler.is_compiling() else half


_LT = "bitsandbytes.autograd._functions:MatMul8bitLt"
_FP = "bitsandbytes.autograd._functions:MatMul8bitFp"
_SINCE_FP = "bitsandbytes>=0.47"
_KEEP = "(_patches_save_int8 if torch.compiler.is_dynamo_compiling() else _patches_keep_int8)"
_NAMES = {
    "_patches_keep_int8": _keep,
    "_patches_save_int8": _save,
    "_patches_recall_int8": _recall,
    "_patches_half": _half,
}


def _backward(function: str, *attributes: str, when: str = "") -> tuple[Rewrite, ...]:
    """Return the edits that recall what forward kept, and read ``attributes`` there and not on ``ctx``."""
    first = "req_gradA, req_gradB, _, req_gradBias, _ = ctx.needs_input_grad"
    return (
        Rewrite(f"{function}.backward", first, f"_patches_kept = _patches_recall_int8(ctx)\n{first}", when=when),
        *(Rewrite(f"{function}.backward", f"ctx.{a}", f"_patches_kept.{a}", when=when) for a in attributes),
    )


PRODUCT_BACKWARD: tuple[Rewrite, ...] = (
    Rewrite(f"{_LT}.forward", "A.to(torch.float16)", "_patches_half(A)", count=2, names=_NAMES),
    Rewrite(f"{_LT}.forward", "ctx.state = state", "ctx.state = None"),
    Rewrite(
        f"{_LT}.forward",
        "ctx.tensors = (CAt, subA, A)",
        f"{_KEEP}(ctx, B, state, CAt, subA, SCAt, state.idx, None)",
    ),
    Rewrite(f"{_LT}.forward", "ctx.tensor_states = (SCAt, state.idx)", ""),
    *_backward(_LT, "tensors", "tensor_states", "state"),
    Rewrite(f"{_FP}.forward", "B = state.CB", "", when=_SINCE_FP),
    Rewrite(
        f"{_FP}.forward",
        "ctx.state = state",
        f"{_KEEP}(ctx, B, state, None, None, None, None, A)",
        names=_NAMES,
        when=_SINCE_FP,
    ),
    Rewrite(f"{_FP}.forward", "ctx.A = A", "", when=_SINCE_FP),
    *_backward(_FP, "A", "state", when=_SINCE_FP),
)
