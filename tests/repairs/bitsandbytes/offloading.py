"""A model whose layers lie on disk: what of them is held between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        return self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)


def offloaded(
    make: Callable[..., torch.nn.Module], reentrant: bool | None, folder: Path
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many weights of four layers are held until backward, the gradient of the input, and what it should be.

    ``make`` makes a layer as ``nn.Linear`` does; ``reentrant`` is how each is checkpointed, None for not.
    """
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    blocks = [Block(make(64, 64, bias=False).requires_grad_(False), reentrant) for _ in range(4)]
    model = torch.nn.Sequential(*blocks).to("cpu")
    x = torch.randn(3, 64, requires_grad=True)
    model(x).square().sum().backward()  # reentrant checkpoints know no autograd.grad
    expected, x.grad = x.grad, None

    brought: list[StorageWeakRef] = []

    def watched(layer: torch.nn.Module) -> None:
        forward = layer.forward

        def noting(x: torch.Tensor) -> torch.Tensor:
            brought.append(StorageWeakRef(layer.weight.untyped_storage()))
            return forward(x)

        layer.forward = noting

    for block in blocks:
        watched(block.layer)
    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    out = model(x)
    held = sum(not reference.expired() for reference in brought)
    assert len(brought) == 4
    out.square().sum().backward()
    return held, x.grad, expected
