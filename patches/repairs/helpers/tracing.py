"""Who traces: torch.compile, for this process, or torch.export, for others."""

from __future__ import annotations


def for_this_process() -> bool:
    """Whether torch.compile traces. What torch.export makes is loaded where our operators are not defined."""
    import torch

    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()
