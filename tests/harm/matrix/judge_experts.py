"""Whether quantized experts are worse than experts in floating point after the same program."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from patches.experts.tensor import QuantizedExperts

from .experts import CHANGES, READERS, Pair, Reader, plain, quantized

CLEAR = "quantized experts"
"""What an error of ours names."""


def worse(kind: str, change: str, readers: dict[str, Reader] = READERS) -> dict[str, str]:
    """Readers after ``change`` that are worse on quantized experts than in floating point, and why."""
    found = {}
    for name, read in readers.items():
        ours, theirs = quantized(kind), plain(kind)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            stopped, failed = _tried(CHANGES[change], ours), _tried(CHANGES[change], theirs)
        if stopped and not failed:
            theirs = plain(kind)  # an error leaves the experts as they were
            if not _clear(stopped):
                found[change] = f"unclear error: {stopped!r}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reads = (functools.partial(read, pair.layer) for pair in (ours, theirs))
            if why := _compared(*reads, _tolerance(kind, ours, theirs)):
                found[name] = why
    return found


def _tolerance(kind: str, ours: Pair, theirs: Pair) -> float:
    half = any(p.layer.w.dtype in (torch.bfloat16, torch.float16) for p in (ours, theirs))
    return 3e-2 if kind == "int8" else 2e-2 if half else 1e-2


def _tried(body: Callable[..., Any], *args: Any) -> BaseException | None:
    try:
        body(*args)
    except Exception as error:
        return error
    return None


def _clear(error: BaseException) -> bool:
    return CLEAR in str(error)


def _compared(ours: Callable[[], Any], theirs: Callable[[], Any], tolerance: float) -> str:
    """Why ``ours`` is worse; empty if it is not."""
    got: list[Any] = []
    expected: list[Any] = []
    error, failed = _tried(lambda: got.append(ours())), _tried(lambda: expected.append(theirs()))
    if error is not None:
        return "" if failed is not None or _clear(error) else f"unclear error: {error!r}"
    if failed is not None:
        return f"a result where floating point has an error: {failed!r}"
    a, b = got[0], expected[0]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} where floating point has {tuple(b.shape)} {b.dtype}"
    if isinstance(a, QuantizedExperts):
        return "still quantized"
    off = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-9)) if a.numel() else 0.0
    return "" if off <= tolerance else f"off by {off:.1e}"
