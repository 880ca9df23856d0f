"""The quantized layers that programs are given, and what they must compute.

The dequantized weight is computed here, from codes and statistics, by a few lines that share nothing with
bitsandbytes or with the patches. It is taken right after the layer is made, before a program does anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from .checks import Check, close

COLUMNS, ROWS = 128, 64
"""Width of input and output: no square, so that a transposed weight is seen; whole tiles of every kernel."""


@dataclass(frozen=True)
class Kind:
    """One way to quantize a linear layer.

    ``tolerance`` is the relative error that its forward may have against the dequantized weight: the rounding of
    float32 where the product is taken in it, that of the activations to 8 bits for INT8.
    """

    name: str
    cls: type
    options: dict[str, Any]
    tolerance: float
    when: str = "bitsandbytes>=0.46.1"


def _four(name: str, quant_type: str, when: str = "bitsandbytes>=0.46.1", **options: Any) -> Kind:
    options = {"compute_dtype": torch.float32, "compress_statistics": False, "quant_type": quant_type, **options}
    tolerance = 2e-2 if options["compute_dtype"] is not torch.float32 else 1e-3 if quant_type == "fp4" else 1e-5
    return Kind(name, Linear4bit, options, tolerance, when)


def _eight(name: str, when: str = "bitsandbytes>=0.46.1", **options: Any) -> Kind:
    return Kind(name, Linear8bitLt, {"has_fp16_weights": False, **options}, 2e-2, when)


KINDS = {
    kind.name: kind
    for kind in (
        _four("nf4", "nf4"),
        _four("nf4-double", "nf4", compress_statistics=True),
        _four("nf4-bf16", "nf4", compute_dtype=torch.bfloat16, compress_statistics=True),
        _four("nf4-float-storage", "nf4", when="bitsandbytes>=0.47", quant_storage=torch.bfloat16),  # as FSDP needs it
        _four("fp4", "fp4", when="bitsandbytes>=0.47"),  # 0.46.1 cannot quantize to it on a CPU
        _eight("int8"),
        _eight("int8-threshold", threshold=6.0),
        _eight("int8-fp16", has_fp16_weights=True, when="bitsandbytes>=0.48"),  # earlier, no CPU kernel trains it
    )
}

NF4 = ("nf4", "nf4-double")
INT8 = ("int8",)
BOTH = (*NF4, *INT8)


@dataclass
class Quantized:
    """A layer of one kind, and what it must compute."""

    kind: Kind
    layer: Any
    weight: torch.Tensor
    """What the codes stand for, float32 of ``(out_features, in_features)``."""
    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def tolerance(self) -> float:
        return max(self.kind.tolerance, 1e-2) if self.rounding else self.kind.tolerance

    @property
    def rounding(self) -> str:
        """Why right outputs may differ in their bits: on a processor with a second kernel, which rounds to bfloat16."""
        return "the packed kernel or the other" if getattr(self.layer, "support_avx512bf16_for_cpu", False) else ""

    def expected(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """What the layer must give for ``x``, in float32."""
        return torch.nn.functional.linear((self.x if x is None else x).detach().float(), self.weight, self.bias)

    def right(self, y: torch.Tensor, x: torch.Tensor | None = None, rounding: str = "") -> Check:
        """The check that ``y`` is what the layer must give for ``x``."""
        return close(y, self.expected(x), self.tolerance, rounding or self.rounding)

    def gradient(self, x: torch.Tensor, upstream: torch.Tensor | float = 1.0, rounding: str = "") -> Check:
        """The check that ``x.grad`` is that of ``(layer(x) * upstream).sum()``."""
        upstream = torch.as_tensor(upstream, device=self.device).expand(*x.shape[:-1], self.weight.shape[0])
        return close(x.grad, upstream.float() @ self.weight, max(self.tolerance, 1e-3), rounding or self.rounding)

    def inputs(self, *shape: int, seed: int = 7, grad: bool = False) -> torch.Tensor:
        """Other inputs, ``(4, in_features)`` unless ``shape`` says the leading dimensions."""
        size = (*(shape or (4,)), self.layer.in_features)
        return random(*size, seed=seed, device=self.device).requires_grad_(grad)

    def other(self, seed: int = 1, **options: Any) -> Quantized:
        """Another layer of this kind; ``options`` as for :func:`quantized`."""
        return quantized(self.kind.name, self.device, seed, **{**self._made, **options})

    def unquantized(self, columns: int = COLUMNS, rows: int = ROWS, seed: int = 0, **options: Any) -> Any:
        """A layer of this kind that still holds its float weights."""
        return unquantized(self.kind, columns, rows, seed=seed, **options)


def random(*shape: int, seed: int, device: Any = "cpu") -> torch.Tensor:
    """Numbers that depend on ``seed`` alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def unquantized(kind: Kind, columns: int, rows: int, seed: int = 0, bias: bool = False, **options: Any) -> Any:
    layer = kind.cls(columns, rows, bias=bias, **{**kind.options, **options})
    spread = torch.logspace(-1, 0, rows)[:, None]  # rows of different size, as in trained models
    layer.weight.data = random(rows, columns, seed=seed) * spread / columns**0.5
    if bias:
        layer.bias.data = random(rows, seed=seed + 100) / 4
    return layer


def quantized(
    kind: str, device: Any = "cpu", seed: int = 0, columns: int = COLUMNS, rows: int = ROWS, **options: Any
) -> Quantized:
    """A layer of ``kind`` on ``device``, with what it must compute."""
    chosen = KINDS[kind]
    layer = unquantized(chosen, columns, rows, seed=seed, **options).requires_grad_(False).to(device)
    weight, codes, scales = dequantized(layer)
    bias = None if layer.bias is None else layer.bias.detach().clone()
    made = {"columns": columns, "rows": rows, **options}
    return Quantized(chosen, layer, weight, codes, scales, bias, random(4, columns, seed=7, device=device), made)


def dequantized(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight that the codes of ``layer`` stand for, a copy of the codes, and of the scales."""
    data = layer.weight.data.clone()
    if isinstance(layer, Linear8bitLt):
        if data.is_floating_point():
            return data.float(), data, torch.ones(len(data), device=data.device)
        scales = layer.weight.SCB.float().clone()
        return data.float() * scales[:, None] / 127, data, scales
    state = layer.weight.quant_state
    return dequantized_4bit(data, state), data, absmax(state)


def absmax(state: bitsandbytes.functional.QuantState) -> torch.Tensor:
    """The scales of the blocks, float32."""
    if not state.nested:
        return state.absmax.float().clone()
    outer = state.state2
    blocks = outer.absmax.repeat_interleave(outer.blocksize)[: state.absmax.numel()]
    return outer.code[state.absmax.long()] * blocks + state.offset


def dequantized_4bit(data: torch.Tensor, state: bitsandbytes.functional.QuantState) -> torch.Tensor:
    """The numbers behind packed codes: two to a byte, the first in the high half."""
    packed = data.reshape(-1).view(torch.uint8).long()
    indices = torch.stack((packed >> 4, packed & 15), dim=1).reshape(-1)[: state.shape.numel()]
    scales = absmax(state).repeat_interleave(state.blocksize)[: indices.numel()]
    return (state.code.to(data.device)[indices] * scales).reshape(state.shape)


Maker = Callable[..., Quantized]
