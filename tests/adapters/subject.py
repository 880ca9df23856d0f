"""The layers that get an adapter: quantized, and the ``nn.Linear`` with the weight that the quantized one stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch import nn

from tests.adapters.options import IN, NAME, OUT

KINDS = ("nf4", "nf4-stored", "int8")
"""NF4; NF4 with double quantization whose packed weights are stored in bfloat16, as FSDP needs it; INT8."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Asked(NamedTuple):
    """Which layer, in a model of which dtype, and whether the model says that it is quantized, as ``from_pretrained`` does."""

    kind: str
    dtype: torch.dtype
    flagged: bool

    def __str__(self) -> str:
        return f"{self.kind} {str(self.dtype).removeprefix('torch.')} {'flagged' if self.flagged else 'unflagged'}"


class Model(nn.Module):
    """One layer, behind a norm that gives the model its dtype."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(IN, dtype=dtype)
        self.l = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(self.norm(x))


def quantized(asked: Asked) -> Model:
    """The model with its layer quantized."""
    torch.manual_seed(0)
    if asked.kind == "int8":
        layer: nn.Module = Linear8bitLt(IN, OUT, has_fp16_weights=False)
    else:
        stored = asked.kind == "nf4-stored"
        options: dict[str, Any] = {"quant_storage": torch.bfloat16, "compress_statistics": True} if stored else {}
        layer = Linear4bit(IN, OUT, compute_dtype=asked.dtype, quant_type="nf4", **options)
    layer.bias.data = layer.bias.data.to(asked.dtype)
    layer.weight.data = layer.weight.data.to(asked.dtype)
    model: Any = Model(layer, asked.dtype).to("cpu")
    if asked.flagged:
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = asked.kind != "int8", asked.kind == "int8"
        model.is_quantized = True
    return model


def plain(asked: Asked) -> Model:
    """The model with the weight that the quantized layer stands for in an ``nn.Linear``."""
    model = quantized(asked)
    layer: Any = model.l
    linear = nn.Linear(IN, OUT, dtype=asked.dtype)
    linear.weight.data = values(layer).to(asked.dtype)
    linear.bias.data = layer.bias.data
    model.l = linear
    model.is_loaded_in_4bit = model.is_loaded_in_8bit = False  # type: ignore[assignment]
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
        vars(model).pop(name, None)
    return model


def values(layer: Any) -> torch.Tensor:
    """What the packed weight of ``layer`` stands for, float32, by bitsandbytes' own functions."""
    if isinstance(layer, Linear8bitLt):
        scales = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
        return int8_vectorwise_dequant(layer.weight.data, scales).float()
    return dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


def batch(asked: Asked) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 5, IN).to(asked.dtype)


def layer_of(model: Any) -> Any:
    return dict(model.named_modules())[f"base_model.model.{NAME}"]
