"""Modules that lay elsewhere in 1.1: a pickle of quantized experts from there names one of them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_PLACES = {"repairs.helpers.experts.tensor": "experts.tensor"}


class _Former(ModuleType):
    """Stands where a module was, and imports it from where it is once something of it is asked for."""

    def __init__(self, name: str, now: str) -> None:
        super().__init__(name)
        self._now = now

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as __path__ and __file__: whoever walks through sys.modules imports nothing
            raise AttributeError(name)
        return getattr(import_module(self._now), name)


def put_in() -> None:
    """Let ``sys.modules`` find them by their former names."""
    package = __package__ or ""
    for before, now in _PLACES.items():
        sys.modules.setdefault(f"{package}.{before}", _Former(f"{package}.{before}", f"{package}.{now}"))
