"""An operator that makes a tensor inside a compiled graph require grad.

Imported only while torch.compile traces a patched hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .code_digest import define_operator


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return x.clone()  # not a view: the model may write into it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _tie(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    tied: torch.Tensor = _Tie.apply(x, anchor)  # type: ignore[no-untyped-call]
    return tied


# An operator rather than the Function itself: the AOT autograd cache takes no custom Function.
# Composite: it expands to the clone, which Inductor fuses away.
OPERATOR: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = define_operator(
    "tie", "(Tensor x, Tensor anchor) -> Tensor", "CompositeImplicitAutograd", _tie
)

anchor = torch.zeros((), requires_grad=True)
"""Requires grad and gets none. An input of the graph, so that a graph without parameters has a backward too."""
