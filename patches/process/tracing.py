"""Who traces: torch.compile, for this process, or torch.export, for others."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, cast

from ..engine.gate import satisfied

Function = TypeVar("Function", bound=Callable[..., Any])


def for_this_process() -> bool:
    """Tell whether torch.compile traces. What torch.export makes is loaded where our operators are not defined."""
    import torch

    # The flag behind is_exporting(), which Dynamo takes for true in all that it traces before torch 2.13. Before 2.7
    # there is none, and no code can tell: then no graph has an operator of ours.
    return torch.compiler.is_compiling() and not getattr(torch.compiler, "_is_exporting_flag", True)


def never_compile(function: Function) -> Function:
    """Return ``function`` so that Dynamo compiles neither it nor the functions that it calls: a decorator with a type."""
    import torch

    return cast(Function, torch.compiler.disable(function))


def never_compile_code(code: CodeType) -> bool:
    """Tell Dynamo to compile neither ``code`` nor the functions that it calls, without importing Dynamo.

    Return whether it could be told: only torch 2.13 and later can.
    """
    if not satisfied("torch>=2.13"):
        return False
    try:
        from torch._C._dynamo import eval_frame

        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(code, strategy)
    except (ImportError, AttributeError, TypeError):  # it is private: a later torch may have another
        return False
    return True
