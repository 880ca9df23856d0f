"""What a step does, counted rather than timed: no other work on the machine can disturb it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
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


def functions(step: Callable[[], Any]) -> dict[str, int]:
    """How many functions ``step`` calls in this thread: of Python, of C (``c``), and of Python in this plugin (``ours``).

    Backward counts, too: on a processor it runs in the thread that asks for it.
    """
    import patches

    ours = str(Path(patches.apply.__code__.co_filename).parent)
    found = {"python": 0, "c": 0, "ours": 0}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found["python"] += 1
            found["ours"] += frame.f_code.co_filename.startswith(ours)
        elif event == "c_call":
            found["c"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


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
