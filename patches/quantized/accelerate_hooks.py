"""The hooks that accelerate has put on a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def hooks_on(module: Module) -> tuple[Any, ...]:
    """Return the hooks on ``module`` itself: one, or the parts of a sequence.

    Not by ``getattr``: a wrapper of peft would give the hook of the wrapped layer.
    """
    hook = vars(module).get("_hf_hook")
    return tuple(getattr(hook, "hooks", () if hook is None else (hook,)))


def hook_of(module: Module, visited: bool = False) -> Any:
    """Return the hook that offloads the weights of ``module``, or None.

    With ``visited``, also if they are on their device at the moment, because of a :class:`Visit`.
    """
    for part in hooks_on(module):
        if getattr(part, "offload", False) or (visited and getattr(part, "_patches_visited", False)):
            return part if hasattr(part, "weights_map") else None
    return None
