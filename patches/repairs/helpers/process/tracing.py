"""Who traces: torch.compile, for this process, or torch.export, for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def for_this_process() -> bool:
    """Whether torch.compile traces. What torch.export makes is loaded where our operators are not defined."""
    import torch

    # The flag behind is_exporting(), which Dynamo takes for true in all that it traces before torch 2.13. Before 2.7
    # there is none, and nobody can tell: then no graph has an operator of ours.
    return torch.compiler.is_compiling() and not getattr(torch.compiler, "_is_exporting_flag", True)


def never(function: Function) -> Function:
    """``function``, which Dynamo does not compile, and nothing that it calls: a decorator with a type."""
    import torch

    return cast(Function, torch.compiler.disable(function))
