"""Who traces: torch.compile, for this process, or torch.export, for others."""

from __future__ import annotations


def for_this_process() -> bool:
    """Whether torch.compile traces. What torch.export makes is loaded where our operators are not defined."""
    import torch

    # The flag behind is_exporting(), which Dynamo takes for true in all that it traces before torch 2.13. Before 2.7
    # there is none, and nobody can tell: then no graph has an operator of ours.
    return torch.compiler.is_compiling() and not getattr(torch.compiler, "_is_exporting_flag", True)
