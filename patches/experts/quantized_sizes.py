"""The bytes of experts that are quantized while they are read.

transformers asks a quantizer for the bytes of each number of a parameter: to plan a device map, and to make room on an
accelerator before it reads. For experts it says the size in floating point, four times too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..config.quantizers import names_precision
from . import quantize_request
from .experts_in_model import has_packed_experts, is_expert_parameter

_HAS_PACKED_EXPERTS = "_patches_has_packed_experts"


def record_packed_experts(quantizer: Any, keys: Callable[[], Iterable[str]]) -> Any:
    """Record on ``quantizer`` whether the checkpoint with the tensors ``keys()`` has packed experts, and return it."""
    if getattr(quantizer, "pre_quantized", False) and names_precision(quantizer):
        vars(quantizer)[_HAS_PACKED_EXPERTS] = has_packed_experts(keys())
    return quantizer


def bytes_of_element(quantizer: Any, model: Any, name: str, parameter: Any) -> float:
    """Return the bytes of a value of ``parameter``; of experts that will be quantized with their part of the statistics."""
    if parameter.dim() == 3 and _quantizes(quantizer) and is_expert_parameter(model, name, parameter):
        from .quantize import QuantizationConfig, is_to_be_quantized

        if is_to_be_quantized(name, quantizer):
            return QuantizationConfig.from_config(quantizer.quantization_config).bytes_per_value(parameter.shape[2])
    return float(parameter.element_size())


def _quantizes(quantizer: Any) -> bool:
    if not names_precision(quantizer) or getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False):
        return False
    return bool(vars(quantizer).get(_HAS_PACKED_EXPERTS)) or quantize_request.is_requested()
