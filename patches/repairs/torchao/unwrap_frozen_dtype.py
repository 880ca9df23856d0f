"""A cast after ``unwrap_tensor_subclass`` does not reach the weights that it unwrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, SetAttribute
from ..reproducers.cast_layers import TWO_DTYPES, show_cast_error

if TYPE_CHECKING:
    import torch


def _moved(metadata: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the metadata of one unwrapped tensor with the dtype that ``fn`` casts its parameters to."""
    import torch

    # A dict, or the list of AffineQuantizedTensor (torchao < 0.18), which ends with its dtype.
    is_list = isinstance(metadata, list)
    key = len(metadata) - 1 if is_list else "dtype"
    old = dict(enumerate(metadata) if is_list else metadata).get(key)
    if not isinstance(old, torch.dtype) or not old.is_floating_point:
        return metadata
    # Only the function itself knows the dtype that it casts to: ask it, with an empty tensor.
    with torch.no_grad():
        new = fn(torch.empty(0, dtype=old)).dtype
    if new == old:
        return metadata
    # A new object: a shallow copy of the module may share the old one.
    return [*metadata[:-1], new] if is_list else {**metadata, key: new}


def _make_apply(original: Any) -> Callable[..., Any]:
    """Make the ``_apply`` of ``UnwrapTensorSubclass``; it calls ``original`` if the class had one."""

    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        import torch

        stack = self.__dict__.get("rebuild_stack", ())
        if stack:
            self.rebuild_stack = [(cls, _moved(metadata, fn), names) for cls, metadata, names in stack]
        moved: torch.nn.Module = (original or torch.nn.Module._apply)(self, fn, recurse)
        return moved

    return _apply


def defect() -> Finding:
    """Unwrap a quantized layer, cast it to float32 and call it."""
    import torch
    from torchao.utils import unwrap_tensor_subclass

    return show_cast_error(lambda model: unwrap_tensor_subclass(model).to(torch.float32))


PATCH = Patch(
    id="torchao-unwrap-frozen-dtype",
    summary="a cast after unwrap_tensor_subclass is lost: eager fails, torch.export writes the old dtype",
    groups=("move", "compile"),
    silent=True,
    messages=TWO_DTYPES,
    links=("https://github.com/pytorch/executorch/issues/18975",),
    why="""
        ``torchao.utils.unwrap_tensor_subclass`` prepares a quantized model for ``torch.export`` and
        ``aot_compile``. It stores the plain tensors of a weight and rebuilds the weight at each access from
        metadata, which includes the dtype to dequantize to. A later ``model.to(torch.float32)``, ``.half()`` or
        ``.float()`` casts scales, biases and norms, but not this metadata. In eager the next forward raises an
        error about two dtypes in one product. ``torch.export`` silently writes ``dequantize_affine(...,
        output_dtype=bfloat16)`` into a float32 program.

        This affects programs that quantize, unwrap and then cast, as exporters do. Upstream:
        https://github.com/pytorch/executorch/issues/18975 (ExecuTorch stopped unwrapping in its own "8da4w"; its
        "torchao:8da*w" mode and its SourceTransform stage still unwrap, as do optimum-executorch and torchchat).
        Shown on torchao 0.14.1 to 0.18.0; the class is the same in all of them.
    """,
    repair="""
        The repair gives ``UnwrapTensorSubclass`` an ``_apply``, which ``Module.to`` and similar methods call on
        every submodule. It casts the entry ``"dtype"`` of the metadata with the function that casts the parameters.
        ``target_dtype`` and the other entries describe how packed weights are stored and stay. Parameters, keys and
        the weight before a cast are not changed, so a model that is not cast is bit-identical. A model that was
        cast before the patch was applied is repaired by its next cast.
    """,
    requires=("torchao>=0.14.1",),
    tested_up_to="0.18.0",
    edits=(SetAttribute("torchao.utils:UnwrapTensorSubclass._apply", make=_make_apply),),
    defect=defect,
)
