"""Make a tensor require grad, as the hook on an embedding does, in a form that Dynamo can trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..process import tracing

if TYPE_CHECKING:
    import torch


class _RequireGrads:
    """A forward hook that makes ``output`` require grad: in place in eager, as a new tensor while compiling.

    cloudpickle saves a hook with the functions that it names. In the place of this one it saves torch's own method, so that
    the file can be loaded without this plugin.
    """

    def __call__(self, output: torch.Tensor) -> torch.Tensor | None:
        if not tracing.for_this_process():
            output.requires_grad_(True)
            return None
        return tie_to_graph(output)

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        return getattr, (torch.Tensor, "requires_grad_")


require_grads = _RequireGrads()


def tie_to_graph(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a new tensor like ``tensor`` that requires grad, for a graph; None if it does already, or grad is disabled."""
    import torch

    if tensor.requires_grad or not torch.is_grad_enabled():
        return None
    from ..operators import require_grad

    return require_grad.OPERATOR(tensor, require_grad.anchor)
