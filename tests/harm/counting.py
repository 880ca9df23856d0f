"""Counting, without putting anything into the library: how often a function of it was entered."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from bitsandbytes.autograd import _functions


@contextlib.contextmanager
def entered(codes: dict[CodeType, Any]) -> Iterator[Counter]:
    """Counts how often each code is entered in this thread, under the name that ``codes`` gives it."""
    count: Counter = Counter()
    before = sys.getprofile()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := codes.get(frame.f_code)) is not None:
            count[name] += 1
        if before is not None:
            before(frame, event, argument)

    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def calls_of(function: Callable[..., Any]) -> Iterator[Counter]:
    """Counts the calls of ``function``, at key 0."""
    with entered({function.__code__: 0}) as count:
        yield count


@contextlib.contextmanager
def products() -> Iterator[Counter]:
    """Counts the products with quantized weights: "forward", and "backward" for the gradients of inputs."""
    names = [n for n in ("MatMul4Bit", "MatMul8bitLt", "MatMul8bitFp") if hasattr(_functions, n)]
    codes = {
        getattr(vars(_functions)[name], which).__code__: which for name in names for which in ("forward", "backward")
    }
    with entered(codes) as count:
        yield count
