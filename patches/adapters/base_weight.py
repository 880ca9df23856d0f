"""How peft makes an adapter for a quantized layer: from which weight, in which dtype, and by which methods it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine import Rewrite
from ..process import call_stack
from ..quantized.int8 import row_scales
from ..quantized.weights import dense_weight

if TYPE_CHECKING:
    import torch

_DENSE: dict[str, tuple[str, Any]] = {
    "": ("_patches_dense_weight", dense_weight.dequantize_weight),
    ".shape": ("_patches_dense_shape", dense_weight.dense_shape),
    ".dtype": ("_patches_dense_dtype", dense_weight.dense_dtype),
}


def read_dense(function: str, weight: str, when: str = "", *, dtype: str = "", count: int = 1) -> Rewrite:
    """Return the edit of a function of ``peft.tuners`` that lets it read a dequantized weight, or its shape or dtype.

    Parameters
    ----------
    function:
        ``module:Class.method`` below ``peft.tuners``.
    weight:
        The expression that reads it: ``<layer>.weight``, with ``.shape`` or ``.dtype`` or without.
    dtype:
        An expression for the dtype to which the weight is dequantized; the dtype before it was quantized if empty.
    """
    layer, _, attribute = weight.rpartition(".weight")
    name, read = _DENSE[attribute]
    call = f"{name}({layer}, {dtype})" if dtype else f"{name}({layer})"
    return Rewrite(f"peft.tuners.{function}", weight, call, count=count, names={name: read}, when=when)


def refuse_if_packed(layer: Any, option: str, remedy: str, does: str = "replaces the weight of its layer") -> Any:
    """Return ``layer``, or raise an error if its weight is packed, which ``option`` of peft cannot work with.

    Raises
    ------
    ValueError
        Names the layer and the option, and says what works: ``remedy``.
    """
    if what := dense_weight.describe_packing(layer):
        name = call_stack.target_name() or row_scales.name_of(layer)
        raise ValueError(f"{option} {does}, but {type(layer).__name__} {name!r} holds {what}. {remedy}")
    return layer


def adapter_dtype(tuner: Any) -> torch.dtype:
    """Return the dtype for an adapter on the base layer of ``tuner``: the dtype of the weight, or the compute dtype of packed weights.

    A ``Linear4bit`` computes in its ``compute_dtype``. A ``Linear8bitLt`` has none: torch's default dtype, in which peft
    makes adapters.
    """
    import torch

    layer = tuner.get_base_layer()
    if not dense_weight.describe_packing(layer):
        dtype: torch.dtype = layer.weight.dtype
        return dtype
    return getattr(layer, "compute_dtype", None) or torch.get_default_dtype()
