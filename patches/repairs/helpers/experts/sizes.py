"""How many bytes experts take that are quantized while they are read.

transformers asks a quantizer for the bytes of each number of a parameter: to plan a device map, and to make room on an
accelerator before it reads. For experts it says those of floating point, four times too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import asked_for
from .found import is_one

_PACKED = "_patches_packed_experts"
"""Of a quantizer: whether the checkpoint that it reads has experts packed."""


def noted(quantizer: Any, files: Iterable[str] | None, state: Mapping[str, Any] | None) -> Any:
    """``quantizer``, which knows then whether the checkpoint has experts packed."""
    if getattr(quantizer, "pre_quantized", False) and of_bitsandbytes(quantizer):
        from ..loading import checkpoint_keys
        from .reading import OF_AN_EXPERT

        vars(quantizer)[_PACKED] = any(map(OF_AN_EXPERT.search, checkpoint_keys.names(files, state)))
    return quantizer


def of_element(quantizer: Any, model: Any, name: str, parameter: Any) -> float:
    """Bytes of a number of ``parameter``; of experts that will be quantized with their statistics."""
    if parameter.dim() == 3 and _quantizes(quantizer) and is_one(model, name, parameter):
        from .quantize import How, is_wanted

        if is_wanted(name, quantizer):
            return How.said_by(quantizer.quantization_config).bytes(parameter.shape[2])
    return float(parameter.element_size())


def _quantizes(quantizer: Any) -> bool:
    if not of_bitsandbytes(quantizer) or getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False):
        return False
    return bool(vars(quantizer).get(_PACKED)) or asked_for.now()


def of_bitsandbytes(quantizer: Any) -> bool:
    """Whether ``quantizer`` makes or reads a model in 4 bits or INT8."""
    config = getattr(quantizer, "quantization_config", None)
    return bool(getattr(config, "load_in_4bit", False) or getattr(config, "load_in_8bit", False))
