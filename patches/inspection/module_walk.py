"""The modules and parameters of a model, in one walk for all that is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Modules = Sequence[tuple[str, Any]]
"""Each module once, with its name, a parent before its children."""


def walk_modules(model: Any) -> Modules:
    """As ``model.named_modules()``, whose generators call each other for every level of the tree."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        prefix = f"{name}." if name else ""
        children = [(f"{prefix}{key}", child) for key, child in module._modules.items() if child is not None]
        waiting.extend(reversed(children))
    return found


def walk_parameters(found: Modules) -> Iterator[tuple[str, Any]]:
    """Each parameter of the modules once, with its name."""
    seen: set[int] = set()
    for name, module in found:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{name}.{key}" if name else key), parameter
