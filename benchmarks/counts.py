"""What a step does, counted rather than timed: no other work on the machine can disturb it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.count += name.startswith(("aten.mm.", "aten.addmm.", "aten.bmm.")) or (
            "bitsandbytes" in name and "mm" in name
        )
        return function(*args, **(kwargs or {}))


def products(step: Callable[[], Any]) -> int:
    """How many matrix products ``step`` computes, those of quantized layers by whatever kernel."""
    with _Products() as mode:
        step()
    return mode.count


def carried(step: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that ``save_on_cpu`` carries in ``step``: of everything, and of quantized weights."""
    total = weights = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total, weights
        total += tensor.nbytes
        weights += tensor.nbytes if tensor.dtype in (torch.int8, torch.uint8) else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return total, weights
