"""Small quantized layers, whole on the device, and what a step with them gives."""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes as bnb
import torch
from torch.utils.checkpoint import checkpoint

from tests import device as simulated

KINDS: dict[str, Callable[..., torch.nn.Module]] = {
    "int8": lambda i, o, **k: bnb.nn.Linear8bitLt(i, o, has_fp16_weights=False, **k),
    "int8-outliers": lambda i, o, **k: bnb.nn.Linear8bitLt(i, o, has_fp16_weights=False, threshold=6.0, **k),
    "nf4": lambda i, o, **k: _four_bit(i, o, nested=False, **k),
    "nf4-nested": lambda i, o, **k: _four_bit(i, o, nested=True, **k),
}
"""Kinds of quantized layers by name: ``KINDS[kind](inputs, outputs, bias=...)``, not quantized yet. FP4, which the
first releases cannot compute on a CPU, would differ from NF4 by a table of 16 numbers."""

CHECKPOINTING = {"no": None, "non-reentrant": False, "reentrant": True}


def _four_bit(inputs: int, outputs: int, nested: bool, **options: object) -> torch.nn.Module:
    options = {"compute_dtype": torch.float32, **options}
    return bnb.nn.Linear4bit(inputs, outputs, quant_type="nf4", compress_statistics=nested, **options)


def stack(kind: str, device: str | None, count: int = 2, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """``count`` frozen layers of 64 x 64 with biases, always the same, quantized on ``device``; None: not quantized."""
    torch.manual_seed(0)
    options = {} if "int8" in kind else {"compute_dtype": dtype}
    layers = (KINDS[kind](64, 64, **options) for _ in range(count))
    model = torch.nn.Sequential(*layers).requires_grad_(False).to(dtype)
    return model if device is None else model.to(device)


def rounds_alike(kind: str, device: str) -> bool:
    """Whether ``device`` quantizes to the bits of the CPU: a GPU adds up the mean of nested absmax in another order."""
    return simulated.kind() != "" or kind != "nf4-nested" or device == "cpu"


def inputs(device: str | torch.device, outliers: bool = True) -> torch.Tensor:
    """Four rows, with a column of outliers unless told."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    if outliers:
        x[:, 3] *= 20
    return x.to(device)


def step(model: torch.nn.Module, x: torch.Tensor, reentrant: bool | None = None) -> list[torch.Tensor]:
    """The output of one call and the gradient at its input, on the host; ``reentrant`` says which checkpointing."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf) if reentrant is None else checkpoint(model, leaf, use_reentrant=reentrant)
    y.float().square().sum().backward()
    return [y.detach().cpu(), leaf.grad.cpu()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether every tensor of one is that of the other, to the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the expected one, in norms; infinite for what is no number."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    found = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    return found if found == found else float("inf")


def statistics(layer: torch.nn.Module) -> list[torch.Tensor]:
    """What belongs to the codes of a layer: SCB, or absmax and tables, those of a nested state too."""
    if isinstance(layer, bnb.nn.Linear8bitLt):
        holders = (layer.weight, layer.state)
        return [scb for holder in holders if (scb := getattr(holder, "SCB", None)) is not None]
    found, state = [], layer.weight.quant_state
    while state is not None:
        found += [state.absmax, state.code, state.offset]
        state = state.state2
    return [tensor for tensor in found if tensor is not None]


def places(model: torch.nn.Module) -> set[str]:
    """Every device that a tensor of a quantized layer is on: codes, statistics and bias."""
    found = []
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear8bitLt):
            found += [getattr(layer.weight, "CB", None), layer.state.CB]
        if isinstance(layer, (bnb.nn.Linear8bitLt, bnb.nn.Linear4bit)):
            found += [layer.weight, layer.bias, *statistics(layer)]
    return {str(tensor.device) for tensor in found if tensor is not None}
