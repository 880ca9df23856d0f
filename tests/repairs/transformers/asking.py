"""Tiny models on disk, plain and quantized, and what the tests of loading ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from patches.repairs.reproducers import tiny_models

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
INT8 = {"load_in_8bit": True}
HOW = {"nf4": NF4, "int8": INT8}
KINDS = ("Linear4bit", "Linear8bitLt")
IDS = torch.arange(8)[None]


def llama(folder: Path, **also: Any) -> Path:
    tiny_models.save_llama(str(folder), **also)
    return folder


def llava(folder: Path) -> Path:
    tiny_models.save_llava(str(folder))
    return folder


def load(folder: Path, how: dict[str, Any] | None = None, kind: str = "LlamaForCausalLM", **also: Any) -> Any:
    """The model in ``folder``, quantized as ``how`` says."""
    given = {} if how is None else {"quantization_config": transformers.BitsAndBytesConfig(**how)}
    return getattr(transformers, kind).from_pretrained(folder, device_map="cpu", **given, **also).eval()


def quantized(model: Any) -> list[str]:
    """Paths of the quantized layers."""
    return [path for path, module in model.named_modules() if type(module).__name__ in KINDS]


def plain(model: Any) -> list[str]:
    """Paths of the linear layers that are not quantized."""
    return [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits
