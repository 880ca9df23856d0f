"""Whether experts are to be quantized while a model is loaded: by a ``with``, or by the environment."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

VARIABLE = "PATCHES_QUANTIZE_EXPERTS"
_ASKED: contextvars.ContextVar[bool] = contextvars.ContextVar("bnb_patches_quantize_experts", default=False)


def now() -> bool:
    """Here, in this thread."""
    return _ASKED.get() or by_environment()


def by_environment() -> bool:
    """``PATCHES_QUANTIZE_EXPERTS=1``; an error for what is neither 1 nor 0."""
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: expected 1 or 0")
    return value == "1"


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Asked for until the end of the ``with``."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)
