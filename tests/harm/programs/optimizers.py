"""Training with the optimizers of bitsandbytes, which step on a CPU since 0.50."""

from __future__ import annotations

import copy

import torch
from bitsandbytes.nn import StableEmbedding
from bitsandbytes.optim import Adam, Adam8bit, GlobalOptimManager

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, ROWS, Quantized, random

SINCE = "bitsandbytes>=0.50"


def no_overrides() -> None:
    """Those that an unpatched run in this process has left are no matter of the program."""
    GlobalOptimManager.get_instance().initialize()


def adapter_of(q: Quantized) -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(q.layer.in_features, ROWS, bias=False).to(q.device)


def train(q: Quantized, adapter: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (q.layer(q.x) + adapter(q.x)).square().mean().backward()
        optimizer.step()


@program(kinds=BOTH, when=SINCE)
def states_of_8_bits(q: Quantized):
    """An adapter beside the layer, with states of 8 bits; about where 32 bits lead."""
    no_overrides()
    adapter, other = adapter_of(q), adapter_of(q)
    optimizer = Adam8bit(adapter.parameters(), lr=1e-3, min_8bit_size=1)
    train(q, adapter, optimizer)
    train(q, other, torch.optim.Adam(other.parameters(), lr=1e-3))
    yield same(optimizer.state[adapter.weight]["state1"].dtype, torch.uint8)
    yield close(adapter.weight.detach(), other.weight.detach(), 1e-2)


@program(kinds=BOTH, when=SINCE)
def resumed_from_its_state_dict(q: Quantized):
    """Model and optimizer from state dicts, in the midst of training."""
    no_overrides()
    adapter, other = adapter_of(q), adapter_of(q)
    optimizer = Adam8bit(adapter.parameters(), min_8bit_size=1)
    train(q, adapter, optimizer)
    again = Adam8bit(other.parameters(), min_8bit_size=1)
    other.load_state_dict(adapter.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(q, adapter, optimizer)
    train(q, other, again)
    yield same(other.weight.detach(), adapter.weight.detach())


@program(kinds=BOTH, when=SINCE)
def an_embedding_with_32_bits(q: Quantized):
    """An embedding of bitsandbytes in front of the layer, whose state has 32 bits in any optimizer."""
    no_overrides()
    found = []
    for kind in (Adam8bit, Adam):
        torch.manual_seed(1)
        embedding = StableEmbedding(64, q.layer.in_features).to(q.device)
        optimizer = kind([embedding.weight])
        for _ in range(3):
            optimizer.zero_grad()
            q.layer(embedding(torch.arange(8, device=q.device))).mul(
                random(8, ROWS, seed=2, device=q.device)
            ).sum().backward()
            optimizer.step()
        found.append(embedding.weight.detach())
    yield same(found[0], found[1])
