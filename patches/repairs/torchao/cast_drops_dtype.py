"""``model.float()`` and ``model.half()`` leave torchao weights in their old dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import getclosurevars
from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ..reproducers.cast_layers import TWO_DTYPES, show_cast_error

if TYPE_CHECKING:
    import torch


def _casting(implementation: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Return ``implementation`` of ``op``; let the shared one of ``aten._to_copy`` give the requested dtype as well."""
    import torch

    if op is torch.ops.aten._to_copy.default and _is_shared(implementation):
        return partial(_to_copy, implementation)
    return implementation


def _is_shared(implementation: Callable[..., Any]) -> bool:
    """Tell whether ``implementation`` is the one of ``TorchAOBaseTensor`` rather than one that a class registered."""
    # The wrapper that torchao registers has the function's name; on 0.14 it only closes over it.
    written = getclosurevars(implementation).nonlocals.get("func", implementation)
    name: str = written.__qualname__
    return name.startswith("_implements_common_tensor_ops.")


def _to_copy(implementation: Callable[..., Any], op: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    import torch

    copy: torch.Tensor = implementation(op, types, args, kwargs)
    dtype = (kwargs or {}).get("dtype")
    # The three that torchao dequantizes to; .double() is as unsupported as it was.
    if dtype in (torch.float32, torch.float16, torch.bfloat16) and dtype != copy.dtype:
        return _with_dtype(copy, dtype)
    return copy


def _with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor``, a quantized weight, as one that dequantizes to ``dtype``; itself if it cannot."""
    import torch
    from torchao.quantization import IntxUnpackedToInt8Tensor

    subclass: Any = tensor
    cls: Any = type(tensor)
    if cls.to is IntxUnpackedToInt8Tensor.to:
        return tensor.to(dtype=dtype)
    names, attributes = subclass.__tensor_flatten__()
    if cls.to is not torch.Tensor.to or "dtype" not in attributes:
        return tensor
    data = {name: getattr(tensor, name) for name in names}
    attributes = {**attributes, "dtype": dtype}
    made: torch.Tensor = cls.__tensor_unflatten__(data, attributes, tensor.size(), tensor.stride())
    return made


def defect() -> Finding:
    """Cast a quantized layer by ``.float()`` and call it."""
    return show_cast_error(lambda model: model.float())


PATCH = Patch(
    id="torchao-cast-drops-dtype",
    summary=".float() and .half() leave quantized weights in their old dtype; the next forward fails",
    groups=("move",),
    messages=TWO_DTYPES,
    links=("https://github.com/pytorch/ao/blob/main/torchao/utils.py",),
    why="""
        ``Module.to(dtype)`` calls ``tensor.to``, which ``IntxUnpackedToInt8Tensor`` overrides. ``.float()``,
        ``.half()`` and ``.bfloat16()`` call ``aten._to_copy`` directly. Its one implementation, shared by all
        subclasses of ``TorchAOBaseTensor``, uses the argument ``device`` and drops ``dtype``. So biases, norms and
        activations are cast and quantized weights are not, silently. The next forward raises an error about two
        dtypes in one product. ``Float8Tensor`` overrides nothing and fails after ``.to(dtype)`` too. ``Int8Tensor``
        uses the dtype of its input in ``linear``, but reports and dequantizes to the old dtype.

        This affects programs that cast a quantized model by the short names, for example to run a bfloat16
        checkpoint in float32 on a CPU, or to export it. Shown on torchao 0.14.1 to 0.18.0.
    """,
    repair="""
        The repair intervenes where torchao looks up an operator. It calls the shared implementation (a class that
        registered its own is not changed), and then gives the result the requested dtype. ``IntxUnpackedToInt8Tensor``,
        whose scales are in its own dtype, does this in its ``to``, so ``.float()`` equals ``.to(torch.float32)`` bit
        for bit. Other classes have an attribute ``dtype``, the one that they dequantize to; packed weights and scales
        stay as they are. (An ``Int8Tensor`` with groups is no longer rounded to bfloat16 on its way to float32, a
        relative error of 1e-3; other forwards that worked are bit-identical.) Classes that override ``to`` in another
        way, or have no such attribute, stay as they were.
    """,
    requires=("torchao>=0.14.1",),
    tested_up_to="0.18.0",
    edits=tuple(
        Rewrite(
            "torchao.utils:_dispatch__torch_dispatch__",
            find=f"cls.{table}[cls][func]",
            replace=f"_patches_casting(cls.{table}[cls][func], func)",
            names={"_patches_casting": _casting},
            when=when,
        )
        for table, when in (("_ATEN_OP_TABLE", "torchao>=0.15"), ("_ATEN_OP_OR_TORCH_FN_TABLE", "torchao<0.15"))
    ),
    defect=defect,
)
