"""Tied weights that wait on the CPU or the disk: one parameter again after each forward.

accelerate gives a module a new parameter on meta after its forward. Of two modules that share one, each gets its own, and
nothing says any more that these are one weight, but the place that both are brought from.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..quantized import accelerate_hooks
from . import weights_maps

if TYPE_CHECKING:
    from torch.nn import Module


def restore_ties(model: Module) -> dict[str, str]:
    """Give modules whose parameters on meta are brought from the same place the same parameter.

    The result says which parameter is which other's.
    """
    first: dict[Hashable, tuple[str, Any]] = {}
    tied = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hook = accelerate_hooks.hook_of(module)
        for name, parameter in module._parameters.items() if hook is not None else ():
            place = weights_maps.map_and_key(hook, name) if parameter is not None and parameter.is_meta else None
            if parameter is None or place is None:
                continue
            full = f"{path}.{name}" if path else name
            source, module._parameters[name] = first.setdefault(
                (place, type(parameter), parameter.dtype, parameter.shape), (full, parameter)
            )
            if source != full:
                tied[full] = source
    return tied
