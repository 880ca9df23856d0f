"""How far a command is, on standard error: a bar of tqdm, or a line of our own where there is none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(label: str, total: int, wanted: bool) -> Iterator[Callable[[], object]]:
    """Give a function to call after each of ``total`` steps; it shows nothing unless that is ``wanted``."""
    if not wanted or not total or sys.stderr is None:
        yield lambda: None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        with _line(label, total) as advance:
            yield advance
    else:
        with tqdm(total=total, desc=label, unit="run", file=sys.stderr, leave=False) as shown:
            yield shown.update


@contextlib.contextmanager
def _line(label: str, total: int) -> Iterator[Callable[[], object]]:
    done = 0

    def show(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r{text}")
            sys.stderr.flush()

    def advance() -> None:
        nonlocal done
        done += 1
        show(f"{label}: {done} of {total}")

    show(f"{label}: 0 of {total}")
    try:
        yield advance
    finally:
        show(" " * len(f"{label}: {total} of {total}") + "\r")
