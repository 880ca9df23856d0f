"""Making a tensor require grad, as the hook on an embedding does, in a form that Dynamo can trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..process import tracing

if TYPE_CHECKING:
    import torch


class _RequireGrads:
    """Makes ``output`` require grad, in place in eager and as a new tensor while compiling; what a hook returns.

    cloudpickle saves a hook with the functions that it names: in the place of this it saves torch's own method, so that the file can
    be loaded where we are not.
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
    """``tensor`` as a new tensor that requires grad, for a graph; None where it does already, or no gradient is asked for."""
    import torch

    if tensor.requires_grad or not torch.is_grad_enabled():
        return None
    from ..operators import require_grad

    return require_grad.OPERATOR(tensor, require_grad.anchor)
