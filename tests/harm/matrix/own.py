"""Modules of a user's own around a quantized weight: nothing of ``bitsandbytes.nn`` but the class of the parameter."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from torch.nn.functional import linear


class OwnInt8(nn.Module):
    """Multiplies by what an ``Int8Params`` stands for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight: Any = bnb.nn.Int8Params(torch.empty(outputs, inputs), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, (self.weight.data.float() * self.weight.SCB[:, None] / 127).to(x.dtype))


class Own4bit(nn.Module):
    """Multiplies by what a ``Params4bit`` stands for."""

    def __init__(self, inputs: int, outputs: int, compress_statistics: bool) -> None:
        super().__init__()
        options = {"quant_type": "nf4", "compress_statistics": compress_statistics}
        self.weight: Any = bnb.nn.Params4bit(torch.empty(outputs, inputs), requires_grad=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, bnb.functional.dequantize_4bit(self.weight.data, self.weight.quant_state).to(x.dtype))
