"""How a reader is declared, and what several share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .subject import Subject

Shown = tuple[Any, torch.Tensor, float]
"""A result, its reference, the relative error that it may have."""


@dataclass(frozen=True)
class Reader:
    name: str
    body: Callable[[Subject], Iterator[Shown]]
    last: bool
    """Whether nothing may follow: the reader leaves another layer behind."""
    whole: bool
    """Whether an error must leave the layer as it was: the reader is one call of the user."""
    slow: bool


READERS: dict[str, Reader] = {}


def reader(last: bool = False, whole: bool = False, slow: bool = False) -> Callable[..., Any]:
    def put(body: Callable[[Subject], Iterator[Shown]]) -> Callable[[Subject], Iterator[Shown]]:
        READERS[body.__name__] = Reader(body.__name__, body, last, whole, slow)
        return body

    return put


def shown(s: Subject, rows: int = 5, dtype: torch.dtype = torch.float32, off: float = 0.0) -> Iterator[Shown]:
    x = s.x(rows, dtype)
    with torch.no_grad():
        yield s.forward(x), s.expected(x), max(s.tolerance, off)


def looks(s: Subject, layer: Any) -> Iterator[Shown]:
    """Another layer that must compute the same."""
    x = s.x()
    with torch.no_grad():
        yield layer(x), s.expected(x), s.tolerance
