"""How many graphs torch.compile makes of a call: what the reproducers about compilation measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def graphs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Compile ``function``, call it once, and count the graphs that hold an operation.

    Counts what the backend gets: Dynamo's own counter of breaks stays 0 where a whole frame
    falls back to eager. The graphs run as they are, nothing is generated. 0 means that nothing
    was compiled.
    """
    import torch

    found: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch.compiler.reset()
    try:
        torch.compile(function, backend=backend)(*args, **kwargs)
    finally:
        torch.compiler.reset()
    return len(found)
