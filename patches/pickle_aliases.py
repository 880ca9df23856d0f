"""Functions that lay elsewhere in 1.1: a pickle of quantized experts from there names the one that rebuilds them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_PLACES = {"repairs.helpers.experts.tensor": {"rebuilt": ("experts.tensor", "rebuild_from_pickle")}}


class _FormerModule(ModuleType):
    """Stands where a module was, and imports a function from its present place when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        package = __package__ or ""
        found = _PLACES[self.__name__.removeprefix(f"{package}.")].get(name)
        if found is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{found[0]}"), found[1])


def put_in() -> None:
    """Let ``sys.modules`` find them by their former names."""
    for place in _PLACES:
        name = f"{__package__}.{place}"
        sys.modules.setdefault(name, _FormerModule(name))
