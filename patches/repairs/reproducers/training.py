"""How reproducers train: steps of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def take_steps(optimizer: Any, model: Module, steps: int = 1, x: Tensor | None = None) -> Exception | None:
    """Train ``model`` on ``x`` (two rows of 64 ones if it is None) and return the error that a step raised, or None.

    Before 0.50 no optimizer of bitsandbytes steps on a CPU: the first step makes the optimizer states and raises an error.
    """
    import torch

    for _ in range(steps):
        model(torch.ones(2, 64) if x is None else x).square().sum().backward()
        try:
            optimizer.step()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            return error
    return None
