"""Quantized parameters as users derive them: with a constructor of their own, whose first argument is another one."""

from __future__ import annotations

import torch
from bitsandbytes.nn import Int8Params, Params4bit


class Tagged4(Params4bit):
    def __new__(cls, tag: str, data: torch.Tensor) -> Tagged4:
        self = Params4bit.__new__(cls, data, requires_grad=False, quant_type="nf4")
        self.tag = tag
        return self


class Tagged8(Int8Params):
    def __new__(cls, tag: str, data: torch.Tensor) -> Tagged8:
        self = Int8Params.__new__(cls, data, requires_grad=False)
        self.tag = tag
        return self
