"""The layers of a trial, and the weight that each must compute: the test's own arithmetic, nothing of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn

from .own import Own4bit, OwnInt8

ROWS, COLUMNS = 64, 128
"""No square, so that a transposed weight is seen; whole blocks of every kernel."""


@dataclass(frozen=True)
class Kind:
    """One way to make a quantized layer."""

    name: str
    family: str
    """``int8``, ``int8-float`` (weights kept in floating point), ``4bit``, ``embedding8``, ``embedding4``, ``own8`` and ``own4``
    (modules of a user's own), ``float`` (not quantized) or ``stable`` (an embedding for 8-bit optimizers)."""
    cls: type
    options: dict[str, Any]
    tolerance: float

    @property
    def bits(self) -> int:
        return next((bits for bits in (4, 8) if str(bits) in self.family), 32)

    @property
    def embeds(self) -> bool:
        return self.family.startswith("embedding") or self.family == "stable"

    @property
    def requantized(self) -> float:
        """The relative error of a weight that is quantized once more."""
        return {4: 0.2, 8: 0.03}.get(self.bits, 0.0)

    def fresh(self, seed: int = 9, **more: Any) -> Any:
        """A layer that still holds float weights."""
        layer = self.cls(*((ROWS, COLUMNS) if self.embeds else (COLUMNS, ROWS)), **{**self.options, **more})
        if layer.weight.device.type != "meta":
            layer.weight.data = random(seed).to(layer.weight.dtype)
            if getattr(layer, "bias", None) is not None:
                layer.bias.data = random(seed + 50)[:, 0].clone()
        return layer.requires_grad_(False)

    def quantized(self, seed: int = 0) -> Any:
        return self.fresh(seed).to("cpu")


def random(seed: int) -> torch.Tensor:
    """Float weights with rows of different size, as in trained models; each seed with other scales."""
    with torch.inference_mode(False):  # the kept one is of no mode
        kept = _random(seed)
    return kept.clone()


@functools.cache
def _random(seed: int) -> torch.Tensor:
    weight = torch.randn(
        ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32
    )
    spread = torch.logspace(-1, 0, ROWS, dtype=torch.float32, device="cpu")[:, None] / 8
    return weight * spread.flip(0) * 3 if seed else weight * spread


def _kinds() -> dict[str, Kind]:
    nn8, nn4 = bnb.nn.Linear8bitLt, bnb.nn.Linear4bit
    kinds = []
    for bias in (False, True):
        for threshold in (0.0, 6.0):
            name = "int8" + ("-threshold" if threshold else "") + ("-bias" if bias else "")
            options = {"has_fp16_weights": False, "threshold": threshold, "bias": bias}
            kinds.append(Kind(name, "int8", nn8, options, 3e-2))
    for threshold, bias in ((0.0, False), (6.0, False), (0.0, True)):
        name = "int8-float" + ("-threshold" if threshold else "") + ("-bias" if bias else "")
        options = {"has_fp16_weights": True, "threshold": threshold, "bias": bias}
        kinds.append(Kind(name, "int8-float", nn8, options, 3e-2))
    for quant_type in ("nf4", "fp4"):
        for nested in (False, True):
            for storage in (torch.uint8, torch.bfloat16, torch.float16, torch.float32):
                for compute in (torch.float32, torch.bfloat16, torch.float16, None):
                    if compute is not torch.float32 and storage is not torch.uint8:
                        continue
                    name = "-".join([quant_type, *(["nested"] if nested else []), *_short(storage, "stored", torch.uint8),
                                     *_short(compute, "computed", torch.float32)])  # fmt: skip
                    options = {"quant_type": quant_type, "compress_statistics": nested, "quant_storage": storage,
                               "compute_dtype": compute, "bias": False}  # fmt: skip
                    tolerance = (
                        2e-2 if compute in (torch.bfloat16, torch.float16) else 1e-2
                    )  # a kernel rounds to bfloat16
                    kinds.append(Kind(name, "4bit", nn4, options, tolerance))
    nf4 = next(kind for kind in kinds if kind.name == "nf4")
    kinds.append(Kind("nf4-bias", "4bit", nn4, {**nf4.options, "bias": True}, 1e-2))
    kinds.append(Kind("embedding4", "embedding4", bnb.nn.EmbeddingNF4, {"dtype": torch.float32}, 1e-3))
    kinds.append(Kind("embedding4-fp4", "embedding4", bnb.nn.EmbeddingFP4, {"dtype": torch.float32}, 1e-3))
    kinds.append(Kind("embedding8", "embedding8", bnb.nn.Embedding8bit, {"dtype": torch.float32}, 1e-2))
    kinds.append(Kind("own-int8", "own8", OwnInt8, {}, 1e-3))
    kinds += [Kind(f"own-nf4{'-nested' * nested}", "own4", Own4bit, {"compress_statistics": nested}, 1e-3)
              for nested in (False, True)]  # fmt: skip
    kinds.append(Kind("float", "float", nn.Linear, {"bias": True}, 1e-4))
    kinds.append(Kind("stable", "stable", bnb.nn.StableEmbedding, {}, 1e-4))
    return {kind.name: kind for kind in kinds}


def _short(dtype: torch.dtype | None, verb: str, usual: torch.dtype) -> list[str]:
    return [] if dtype is usual else [f"{verb}-{str(dtype).removeprefix('torch.').replace('float', 'f')}"]


KINDS = _kinds()
CORE = ("int8", "int8-threshold-bias", "nf4", "nf4-nested", "nf4-stored-bf16")
"""These meet every state, change and reader; the others meet each change and reader in a state that rotates."""


class Holder(nn.Module):
    """The model around a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@dataclass
class Subject:
    """A model with one layer, and what it must compute."""

    kind: Kind
    root: Any
    weight: torch.Tensor
    """What the user set, float32, without adapters."""
    bias: torch.Tensor | None
    path: str = "layer"
    slack: float = 0.0
    """What the weight may be off, because it was quantized from what the user gave."""
    call: Callable[[torch.Tensor], torch.Tensor] | None = None
    given: bool = False
    """Whether ``call`` brings its own weight, so that changes of the layer do not reach it."""
    adapter: str = ""
    """``lora``, ``dora``, ``merged``, or empty."""
    adapters: list[torch.Tensor] = field(default_factory=list)
    """What the parameters of the adapter hold, seen last where they were in memory."""
    delta: torch.Tensor | None = None
    offloaded: bool = False
    tied: bool = False
    folders: list[Any] = field(default_factory=list)
    donors: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, kind: Kind) -> Subject:
        layer = kind.quantized()
        bias = getattr(layer, "bias", None)
        return cls(kind, Holder(layer), plain_weight(layer), None if bias is None else bias.detach().clone())

    @property
    def layer(self) -> Any:
        return self.root.get_submodule(self.path)

    def replace_layer(self, layer: Any) -> None:
        parent, _, name = self.path.rpartition(".")
        setattr(self.root.get_submodule(parent), name, layer)

    def donor(self, seed: int = 3) -> tuple[Any, torch.Tensor]:
        """Another quantized layer of this kind, and its weight."""
        layer = self.kind.quantized(seed)
        self.donors.append(layer)  # another model that lives on
        return layer, plain_weight(layer)

    def becomes(self, weight: torch.Tensor, slack: float = 0.0) -> None:
        self.weight, self.slack = weight.detach().float().clone(), max(slack, 0.0)

    def rows_become(self, order: torch.Tensor) -> None:
        """The rows of the weight were put in this order: those of the bias follow."""
        self.becomes(self.weight[order], self.slack)
        if self.bias is not None:
            self.layer.bias.data.copy_(self.layer.bias.data[order].clone())
            self.bias = self.bias[order].clone()

    def becomes_what_it_holds(self, write: Callable[[], Any]) -> None:
        """After ``write``, the weight is what the numbers stand for, if they stood for what was set; else none is right."""
        held = plain_weight(self.layer)
        right = held.shape == self.weight.shape and torch.dist(held, self.weight) <= self.tolerance * self.weight.norm()
        write()
        self.becomes(plain_weight(self.layer) if right else torch.full(self.weight.shape, float("nan")))

    def x(self, rows: int = 5, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        if self.kind.embeds:
            return torch.randint(0, ROWS, (rows,), generator=generator, device="cpu")
        x = torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float32, device="cpu")
        if self.kind.options.get("threshold"):
            x[:, 3] *= 20  # an outlier column
        return x.to(dtype).requires_grad_(grad)

    def effective(self) -> torch.Tensor:
        """The weight with its adapter, computed from the adapter's own parameters."""
        if self.adapter not in ("lora", "dora"):
            return self.weight
        wrapped = self.root.get_submodule(self.path.removesuffix(".base_layer"))
        found = [wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight]
        if self.adapter == "dora":
            found.append(wrapped.lora_magnitude_vector["default"].weight)
        if not any(tensor.is_meta for tensor in found):  # as they are where they are offloaded
            self.adapters = [tensor.detach().float().clone() for tensor in found]
        a, b, *size = self.adapters
        merged = self.weight + b @ a * wrapped.scaling["default"]
        return merged * (size[0] / merged.norm(dim=1))[:, None] if size else merged

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind.embeds:
            rows = self.weight[x]
            return nn.functional.layer_norm(rows, (COLUMNS,)) if self.kind.family == "stable" else rows
        return nn.functional.linear(
            x.detach().float(), self.effective(), None if self.bias is None else self.bias.float()
        )

    @property
    def tolerance(self) -> float:
        threshold = getattr(getattr(self.layer, "state", None), "threshold", None)
        rounded_outliers = 1e-2 if threshold == 0 and self.kind.options.get("threshold") else 0.0
        return self.kind.tolerance + self.slack + rounded_outliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.call or self.root)(x)

    def held(self) -> tuple[Any, ...]:
        """What the layer holds, for the comparison before and after an error."""
        layer = self.layer
        weight, state = layer.weight, getattr(layer, "state", None)
        found: list[Any] = [_print(weight.data), _print(getattr(layer, "bias", None))]
        if state is not None:
            owner = state if state.SCB is not None else weight
            found.append(_print(getattr(owner, "SCB", None)))
        quant = getattr(weight, "quant_state", None)
        if quant is not None:
            found += [_print(quant.absmax), _print(quant.code), _print(quant.offset), quant.dtype, tuple(quant.shape)]
            if quant.state2 is not None:
                found.append(_print(quant.state2.absmax))
        return tuple(found)


def _print(tensor: Any) -> Any:
    if tensor is None or tensor.is_meta:
        return None if tensor is None else "meta"
    plain = tensor.detach().as_subclass(torch.Tensor).contiguous()
    return str(plain.dtype), tuple(plain.shape), hash(plain.reshape(-1).view(torch.uint8).numpy().tobytes())


# -- what stored numbers stand for ---------------------------------------------------------------


def plain_weight(layer: Any) -> torch.Tensor:
    """What the numbers that ``layer`` holds stand for, wherever it holds them."""
    data = layer.weight.data.detach().as_subclass(torch.Tensor)
    quant = getattr(layer.weight, "quant_state", None)
    if quant is not None:
        return four_bits(data, quant.code, quant.shape, quant.blocksize, scales_of(quant))
    if data.dtype != torch.int8:
        return data.float().clone()
    state = getattr(layer, "state", None)
    scales = layer.weight.SCB if state is None or state.SCB is None else state.SCB
    return data.float() * scales.detach().float().reshape(-1, 1) / 127


def scales_of(quant: Any) -> torch.Tensor:
    if not quant.nested:
        return quant.absmax.float().clone()
    outer = quant.state2
    return nested_scales(quant.absmax, outer.code, outer.absmax, outer.blocksize, quant.offset)


def nested_scales(codes: Any, code: Any, absmax: Any, blocksize: int, offset: Any) -> torch.Tensor:
    blocks = absmax.float().repeat_interleave(blocksize)[: codes.numel()]
    return code.float()[codes.long()] * blocks + offset


def four_bits(data: torch.Tensor, code: Any, shape: Any, blocksize: int, scales: Any) -> torch.Tensor:
    packed = data.contiguous().reshape(-1).view(torch.uint8).long()
    count = int(torch.Size(shape).numel())
    indices = torch.stack((packed >> 4, packed & 15), dim=1).reshape(-1)[:count]
    weight = code.float()[indices] * scales.repeat_interleave(blocksize)[:count]
    return weight.reshape(tuple(shape))
