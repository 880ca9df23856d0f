"""The backward of a 4-bit product takes whatever lies in the buffers of its weight by then.

In every release ``MatMul4Bit`` puts the packed weight on ``ctx`` as a plain attribute, and its backward
reads the statistics from the live ``QuantState``. So a weight whose buffer is written again between
forward and backward (streaming of layers through one buffer) gives a wrong gradient without an error, and
a weight that was offloaded after its forward stays on the device until backward, checkpointed or not:
saved-tensor hooks (``save_on_cpu``, non-reentrant checkpointing) never see it. (#2034)

The repair keeps references to weight and statistics, as they are in forward, and raises autograd's error
in backward if one was written to since. What is not resident (brought by accelerate's offloading for
this forward, or no parameter at all) is saved with ``ctx.save_for_backward``, where hooks see it. A
resident weight is not: no hook could free it, but each would carry or recompute it (see
``helpers/kept_weights.py``). Nothing is copied. Tensors made in inference mode, which autograd refuses to
save, stay on ``ctx``, as before.

A backward whose forward ran before the patch was applied is as it was. One whose forward ran with the
patch goes through the original code after a revert, but for weights that were saved: that is an error.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from ....engine import Finding, Patch, Rewrite
from ...helpers import kept_weights

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState

_ID = "bitsandbytes-matmul4bit-saved-tensors"
_ELSEWHERE = kept_weights.Elsewhere(_ID)


class _Kept(NamedTuple):
    """What backward reads on ``ctx``, under the names that it has there."""

    tensors: tuple[None, torch.Tensor]
    state: QuantState


def _operands(weight: torch.Tensor, state: QuantState) -> tuple[torch.Tensor, ...]:
    """``weight`` and the tensors of ``state`` that dequantizing it reads, as they are now."""
    nested = state.state2
    if nested is None:
        return weight, state.absmax
    return weight, state.absmax, state.offset, nested.absmax, nested.code


def _noted(weight: torch.Tensor, state: QuantState) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Those, and how often each was written to. Written out: every layer comes by twice in each step of a training.

    Raises ``RuntimeError`` for what was made in inference mode: there torch does not count.
    """
    nested, absmax = state.state2, state.absmax
    if nested is None:
        return (weight, absmax), (weight._version, absmax._version)
    offset, absmax2, code2 = state.offset, nested.absmax, nested.code
    versions = weight._version, absmax._version, offset._version, absmax2._version, code2._version
    return (weight, absmax, offset, absmax2, code2), versions


def _state(operands: tuple[torch.Tensor, ...], state: QuantState) -> QuantState:
    """One like ``state`` that holds ``operands``."""
    from bitsandbytes.functional import QuantState

    _, absmax, *nested = operands
    fields = {"shape": state.shape, "blocksize": state.blocksize, "quant_type": state.quant_type}
    if nested:
        offset, absmax2, code2 = nested
        state2 = QuantState(absmax2, code=code2, blocksize=state.state2.blocksize, dtype=state.state2.dtype)
        fields.update(offset=offset, state2=state2)
    return QuantState(absmax, code=state.code, dtype=state.dtype, **fields)


def keep(ctx: Any, weight: torch.Tensor, state: QuantState) -> None:
    """Note for backward what ``weight`` and ``state`` hold now, if the weight is resident."""
    owner = weight._base  # it comes as a view, or as itself from who calls the function
    if kept_weights.is_resident(weight if owner is None else owner):
        ctx.tensors = None, weight
        try:
            ctx._patches_noted = _noted(weight, state)
        except RuntimeError:
            ctx._patches_noted = _operands(weight, state), None
    else:
        save(ctx, weight, state)


def save(ctx: Any, weight: torch.Tensor, state: QuantState) -> None:
    """Save it with autograd, where hooks see it, but for what was made in inference mode."""
    operands = _operands(weight, state)
    if kept_weights.savable(*operands):
        ctx.save_for_backward(*operands)
        ctx.tensors, ctx._patches_noted = _ELSEWHERE, None
    else:
        ctx.tensors, ctx._patches_noted = (None, weight), (operands, None)


def recall(ctx: Any) -> Any:
    """An object with the ``tensors`` and the ``state`` that forward used: ``ctx``, if it has them."""
    noted = getattr(ctx, "_patches_noted", ())
    if noted:
        operands, versions = noted
        try:
            now, written = _noted(operands[0], ctx.state)
        except RuntimeError:
            now, written = _operands(operands[0], ctx.state), None
        if written == versions and all(map(is_, operands, now)):
            return ctx
    if not ctx.needs_input_grad[0] or noted == ():  # no need; a forward without the patch
        return ctx
    if noted is None:
        operands = ctx.saved_tensors
    elif versions and versions != kept_weights.versions_of(operands):
        kept_weights.refuse(operands, versions)
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
    return Finding(off > 0, f"gradient off by {off:.2f}, no error")


_FUNCTION = "bitsandbytes.autograd._functions:MatMul4Bit"

PATCH = Patch(
    id=_ID,
    summary="a reused 4-bit weight buffer gives wrong gradients silently; offloaded weights stay until backward",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.8", "2.13", "2.14", "2.15"),
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Linear4bit.forward",
            "inp_dtype = x.dtype",
            "inp_dtype = x.dtype\nif '_hf_hook' in vars(self):\n    _patches_notice(self)",
            names={"_patches_notice": kept_weights.notice},
        ),
        Rewrite(
            f"{_FUNCTION}.forward",
            "ctx.tensors = (None, B)",
            "(_patches_save_4bit if torch.compiler.is_compiling() else _patches_keep_4bit)(ctx, B, quant_state)",
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
