"""Weights whose class says packed and whose contents are floating point: contents decide.

``Int8Params`` and ``Params4bit`` are classes of weights that are quantized, that are not quantized yet, that are never
(``has_fp16_weights``), and of weights that someone dequantized in place (``layer.weight.data = ...``). Code that
multiplies the last three by scales, or quantizes the last one again, computes other numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...process import call_stack
from ..four_bit import quant_states
from ..int8 import plain_weights, scale_ownership

if TYPE_CHECKING:
    from torch import Tensor


def holds_floats(weight: Any) -> bool:
    """Tell whether ``weight``, of a class of bitsandbytes, holds the values themselves, so that it is not dequantized."""
    from bitsandbytes.nn.modules import Int8Params, Params4bit  # no package: an import from one takes 0.5 us more

    if isinstance(weight, Int8Params):
        return bool(weight.dtype.is_floating_point) and not _is_cast(weight)
    return isinstance(weight, Params4bit) and not quant_states.is_packed(weight)


def _is_cast(weight: Any) -> bool:
    """Tell whether ``weight`` holds packed weights in floating point, which are dequantized as packed weights are."""
    import torch

    if weight.has_fp16_weights or torch.compiler.is_compiling() or weight.is_meta or not weight.numel():
        return False
    return plain_weights.are_packed_values(weight.data)


def was_never_quantized(layer: Any) -> bool:
    """Tell whether ``layer`` is quantized by its class alone: its weight is a plain tensor of the layer's own shape.

    So are a tied embedding, and a weight that a checkpoint keeps in 16 bits. Packed weights are not, even if FSDP made
    them plain in floating-point storage: they have a quarter of the bytes at most.
    """
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    if not isinstance(layer, (Linear4bit, Linear8bitLt)):
        return False
    weight = layer.weight
    if isinstance(weight, (Int8Params, Params4bit)) or not weight.is_floating_point() or weight.element_size() < 2:
        return False
    return tuple(weight.shape) == (layer.out_features, layer.in_features)


def parameter_to_move(module: Any, name: str) -> Tensor:
    """Return the parameter or buffer ``name`` of ``module``; made a plain parameter if ``module`` reads its values."""
    import torch

    weight: Tensor = getattr(module, name)
    if name not in module._parameters or weight.is_meta or not _is_plain(module, weight):
        return weight
    module._parameters[name] = plain = torch.nn.Parameter(weight.data, weight.requires_grad)
    return plain


def _is_plain(module: Any, weight: Any) -> bool:
    from bitsandbytes.nn import Int8Params, Linear8bitLt, Params4bit

    if isinstance(weight, Params4bit):
        return quant_states.is_marked_quantized(weight) and not quant_states.is_packed(weight)
    if not isinstance(weight, Int8Params) or not _was_dequantized(weight):
        return False
    if scale_ownership.is_torch_layer(module) or scale_ownership.has_custom_forward(module):
        return True
    if isinstance(module, Linear8bitLt):
        plain_weights.refuse_packed_values(module, weight)
    return False


def _was_dequantized(weight: Any) -> bool:
    """Tell whether ``weight``, an ``Int8Params``, held packed weights and holds numbers now."""
    if not weight.dtype.is_floating_point or weight.has_fp16_weights or weight.is_meta:
        return False
    return scale_ownership.was_quantized(weight)


def to_plain_parameter(weight: Any) -> Any:
    """Return ``weight``, an ``Int8Params``, as a plain parameter if its module reads values; None if it may be quantized.

    Raise if it holds packed weights that were cast, which a layer of bitsandbytes would quantize as if they were
    numbers. A weight that is in no module yet is quantized: accelerate, on bitsandbytes 0.46, makes one of the packed
    weights that it reads from the disk, and gives it their scales afterwards.
    """
    import torch

    if torch.compiler.is_compiling() or not _was_dequantized(weight):
        return None
    modules = scale_ownership.modules_of(weight)
    if not modules:
        return None
    if all(map(scale_ownership.is_torch_layer, modules)):  # no layer of bitsandbytes any more
        return torch.nn.Parameter(weight.data, weight.requires_grad)
    home = scale_ownership.owning_layer(weight)
    layer = call_stack.mover_of(weight) if home is None else home
    if plain_weights.is_cast_packed_weight(weight, layer) and not (
        layer is not None and scale_ownership.has_custom_forward(layer)
    ):
        raise plain_weights.make_cast_error(layer)
    return None
