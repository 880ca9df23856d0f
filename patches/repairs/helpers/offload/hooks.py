"""The hooks that accelerate has put on a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def on(module: Module) -> tuple[Any, ...]:
    """The hooks on ``module``: one, or several in one. Its own, for a wrapper of peft gives that of what it wraps."""
    hook = vars(module).get("_hf_hook")
    return tuple(getattr(hook, "hooks", () if hook is None else (hook,)))
