"""INT8 layers and products for tests, and what one step of them gives."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from torch.utils.checkpoint import checkpoint


def linear(device: str = "cpu", bias: bool = True, **options) -> bnb.nn.Linear8bitLt:
    torch.manual_seed(0)
    return bnb.nn.Linear8bitLt(64, 96, bias=bias, has_fp16_weights=False, **options).to(device)


def gradients(layer, x: torch.Tensor, how: bool | None = None) -> list[torch.Tensor]:
    """Output and gradients of one step; ``how`` is ``use_reentrant`` of checkpointing, None without."""
    layer.zero_grad()
    x = x.clone().requires_grad_(True)
    y = layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def product(codes: torch.Tensor, scales: torch.Tensor, training: bool, bias: torch.Tensor | None = None):
    """The function ``x -> x @ weight.T`` for an INT8 weight that is no parameter of any layer."""

    def call(x: torch.Tensor) -> torch.Tensor:
        state = bnb.MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights, state.is_training = codes, scales, False, training
        return bnb.matmul(x, codes, state=state, bias=bias)

    return call


def packed(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """What saved-tensor hooks get to see of one forward."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        layer(x.clone().requires_grad_(True))
    return seen
