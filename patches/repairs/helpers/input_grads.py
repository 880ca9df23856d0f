"""Making a tensor require grad, as the hook on an embedding does, in a form that Dynamo can trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import tracing

if TYPE_CHECKING:
    import torch


def require_grads(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    """Forward hook: make ``output`` require grad, in place in eager and as a new tensor while compiling."""
    if not tracing.for_this_process():
        output.requires_grad_(True)
        return None
    return tied(output)


def tied(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` as a new tensor that requires grad, for a graph; None where it does already, or nobody asks."""
    import torch

    if tensor.requires_grad or not torch.is_grad_enabled():
        return None
    from .operators import tie

    return tie.OPERATOR(tensor, tie.anchor)
