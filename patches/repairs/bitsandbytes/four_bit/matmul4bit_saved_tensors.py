"""The backward of a 4-bit product reads the weight as it is at that time, not as it was in forward."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from ....engine import Finding, Patch, Rewrite
from ....quantized import saved_for_backward
from ....quantized.saved_for_backward import onloaded, parameter_classes

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

_ID = "bitsandbytes-matmul4bit-saved-tensors"
_ELSEWHERE = saved_for_backward.SavedElsewhere(_ID)


class _Kept(NamedTuple):
    """The attributes of ``ctx`` that backward reads."""

    tensors: tuple[None, torch.Tensor]
    state: QuantState


def _operands(weight: torch.Tensor, state: QuantState) -> tuple[torch.Tensor, ...]:
    """Return ``weight`` and the tensors of ``state`` that dequantizing it reads, as they are now."""
    nested = state.state2
    if nested is None:
        return weight, state.absmax
    return weight, state.absmax, state.offset, nested.absmax, nested.code


def _state(operands: tuple[torch.Tensor, ...], state: QuantState) -> QuantState:
    """Return a quantization state like ``state`` that holds ``operands``."""
    from bitsandbytes.functional import QuantState

    _, absmax, *nested = operands
    fields = {"shape": state.shape, "blocksize": state.blocksize, "quant_type": state.quant_type}
    if nested:
        offset, absmax2, code2 = nested
        state2 = QuantState(absmax2, code=code2, blocksize=state.state2.blocksize, dtype=state.state2.dtype)
        fields.update(offset=offset, state2=state2)
    return QuantState(absmax, code=state.code, dtype=state.dtype, **fields)


def keep(ctx: Any, weight: torch.Tensor, state: QuantState) -> None:
    """If ``weight`` is resident, note it, the tensors of ``state`` and how often each was written to; else save them.

    Written out, like :func:`recall`: each layer calls both in each training step. Dynamo calls :func:`save` instead. A trace
    of torch.export or AOT autograd calls this, and saves, because in it no weight is a parameter by class.
    """
    owner = weight._base  # it comes as a view, or as itself from who calls the function
    if onloaded or type(owner) not in parameter_classes:
        if not saved_for_backward.is_resident(weight if owner is None else owner):
            save(ctx, weight, state)
            return
    ctx.tensors = None, weight
    nested, absmax = state.state2, state.absmax
    try:
        if nested is None:
            ctx._patches_noted = weight, absmax, weight._version, absmax._version
            return
        offset, absmax2, code2 = state.offset, nested.absmax, nested.code
        versions = weight._version, absmax._version, offset._version, absmax2._version, code2._version
        ctx._patches_noted = weight, absmax, offset, absmax2, code2, *versions
    except RuntimeError:
        _note_without_versions(ctx, _operands(weight, state))


def save(ctx: Any, weight: torch.Tensor, state: QuantState) -> None:
    """Save the tensors with autograd, where hooks see them, except tensors that were made in inference mode."""
    operands = _operands(weight, state)
    if saved_for_backward.is_savable(*operands):
        ctx.save_for_backward(*operands)
        ctx.tensors, ctx._patches_noted, ctx._patches_saved = _ELSEWHERE, None, True
    else:
        ctx.tensors = None, weight
        _note_without_versions(ctx, operands)


def _note_without_versions(ctx: Any, operands: tuple[torch.Tensor, ...]) -> None:
    """Note ``operands`` that were made in inference mode, where torch does not count how often a tensor is written to."""
    ctx._patches_noted = *operands, *(None for _ in operands)


def recall(ctx: Any) -> Any:
    """Return an object with the ``tensors`` and the ``state`` that forward used: ``ctx``, if it has them."""
    noted = getattr(ctx, "_patches_noted", None)
    if noted is not None:
        state = ctx.state
        nested, absmax = state.state2, state.absmax
        try:
            if nested is None:
                if len(noted) == 4 and absmax is noted[1]:
                    if noted[0]._version == noted[2] and absmax._version == noted[3]:
                        return ctx
            elif len(noted) == 10:
                weight, absmax1, offset, absmax2, code2, v, v1, v2, v3, v4 = noted
                if absmax is absmax1 and state.offset is offset and nested.absmax is absmax2 and nested.code is code2:
                    if weight._version == v and absmax._version == v1 and offset._version == v2:
                        if absmax2._version == v3 and code2._version == v4:
                            return ctx
        except RuntimeError:  # made in inference mode
            now = _operands(noted[0], state)
            if len(noted) == 2 * len(now) and all(map(is_, now, noted)):
                return ctx
    elif not getattr(ctx, "_patches_saved", False):  # a forward without the patch
        return ctx
    return _recall_others(ctx, noted)


def _recall_others(ctx: Any, noted: tuple[Any, ...] | None) -> Any:
    """Return the tensors of forward if they were saved (``noted`` is None), or are not on ``ctx`` as they were noted."""
    if not ctx.needs_input_grad[0]:
        return ctx
    if noted is None:
        operands = ctx.saved_tensors
    else:
        operands, versions = noted[: len(noted) // 2], noted[len(noted) // 2 :]
        if None not in versions and versions != saved_for_backward.versions_of(operands):
            saved_for_backward.raise_version_error(operands, versions)
    return _Kept((None, operands[0]), _state(operands, ctx.state))


def defect() -> Finding:
    """Write the next weight into the buffer of a layer between its forward and its backward."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer, other = (
        Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu") for _ in range(2)
    )
    x = torch.randn(2, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    out = layer(x).sum()
    with torch.no_grad():
        layer.weight.copy_(other.weight)
    try:
        (gradient,) = torch.autograd.grad(out, x)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return Finding(False, "autograd's error")
    off = ((gradient - expected).norm() / expected.norm()).item()
    return Finding(off > 0, f"the buffer was reused: relative error of the gradient {off:.2f}, no message")


_FUNCTION = "bitsandbytes.autograd._functions:MatMul4Bit"

PATCH = Patch(
    id=_ID,
    summary="reusing a 4-bit weight buffer silently gives wrong gradients; offloaded weights stay in memory until backward",
    groups=("train", "offload"),
    silent=True,
    words=("OOM (out of memory)",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034",),
    why="""
        In every release ``MatMul4Bit`` keeps the packed weight as a plain attribute of ``ctx``, and its backward
        reads absmax from the live ``QuantState``. If the buffer of a weight is overwritten between forward and
        backward (when layers are streamed through one buffer), the gradient is wrong, without an error. If the
        weight was offloaded after its forward, it stays on the device until backward, because saved-tensor hooks
        (``save_on_cpu``, non-reentrant checkpointing) never see it. (#2034)
    """,
    repair="""
        The repair keeps references to the weight and absmax of the forward, and backward raises autograd's error if
        one of them was changed since. A weight that accelerate's offloading brought for this forward, or that is
        not a parameter, is saved with ``ctx.save_for_backward``, where hooks see it. A resident weight is not:
        hooks could not free it, but each would copy or recompute it (see ``quantized/saved_for_backward.py``).
        Nothing is copied. Tensors made in inference mode, which autograd refuses to save, stay on ``ctx`` as
        before.

        If the forward ran before the patch was applied, its backward is as it was. If the forward ran with the
        patch and the backward runs after a revert, it takes the original code; for weights that were saved it
        raises an error.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Linear4bit.forward",
            "inp_dtype = x.dtype",
            "inp_dtype = x.dtype\nif '_hf_hook' in self.__dict__:\n    _patches_notice(self)",
            names={"_patches_notice": saved_for_backward.record_onloaded_weight},
        ),
        Rewrite(
            f"{_FUNCTION}.forward",
            "ctx.tensors = (None, B)",
            "(_patches_save_4bit if torch.compiler.is_dynamo_compiling() else _patches_keep_4bit)(ctx, B, quant_state)",
            names={"_patches_keep_4bit": keep, "_patches_save_4bit": save},
        ),
        # Left of the original: ``ctx.tensors`` in the branch where backward needs neither.
        Rewrite(
            f"{_FUNCTION}.backward",
            "req_gradA, _, _, req_gradBias, _ = ctx.needs_input_grad",
            "_patches_kept = _patches_recall_4bit(ctx)\nreq_gradA, _, _, req_gradBias, _ = ctx.needs_input_grad",
            names={"_patches_recall_4bit": recall},
        ),
        Rewrite(f"{_FUNCTION}.backward", "ctx.tensors", "_patches_kept.tensors"),
        Rewrite(f"{_FUNCTION}.backward", "ctx.state", "_patches_kept.state"),
    ),
    defect=defect,
)
