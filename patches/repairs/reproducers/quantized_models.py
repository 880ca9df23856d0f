"""Tiny models that are quantized while they are loaded: what reproducers about ``from_pretrained`` begin with."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


def load_quantized(model: PreTrainedModel, how: BitsAndBytesConfig, **options: Any) -> Any:
    """Save ``model`` and load it again, quantized by the configuration ``how``; ``options`` are those of from_pretrained."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, quantization_config=how, **options)


def save_quantized(folder: str, model: PreTrainedModel, how: BitsAndBytesConfig, **options: Any) -> Any:
    """Do the same, save the quantized model in ``folder``, and return it."""
    quantized = load_quantized(model, how, **options)
    quantized.save_pretrained(folder)
    return quantized
