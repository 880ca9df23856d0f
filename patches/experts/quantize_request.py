"""Whether experts are to be quantized while a model is loaded: by a ``with``, or by the environment."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

VARIABLE = "PATCHES_QUANTIZE_EXPERTS"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_ASKED: contextvars.ContextVar[bool] = contextvars.ContextVar("bnb_patches_quantize_experts", default=False)


def is_requested() -> bool:
    """Here, in this thread."""
    return _ASKED.get() or requested_by_environment()


def requested_by_environment() -> bool:
    """``PATCHES_QUANTIZE_EXPERTS=1``; an error for a value that is neither on nor off."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in ("", *_YES, *_NO):
        raise ValueError(f"{VARIABLE}={value!r} is not valid; expected one of {', '.join((*_YES, *_NO))}")
    return value in _YES


@contextlib.contextmanager
def requested() -> Iterator[None]:
    """Asked for until the end of the ``with``."""
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)
