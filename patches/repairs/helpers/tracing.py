"""Who traces: torch.compile, for this process, or torch.export, for others."""

from __future__ import annotations


def for_this_process() -> bool:
    """Whether torch.compile traces. What torch.export makes is loaded where our operators are not defined."""
    import torch

    # Before torch 2.7 nobody can tell: then no graph has an operator of ours.
    is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return torch.compiler.is_compiling() and not is_exporting()
