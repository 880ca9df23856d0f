"""One line on standard error for a command that takes longer than two seconds: what it is doing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

SECONDS = 2.0


@contextlib.contextmanager
def after_a_while(doing: str, wanted: bool = True) -> Iterator[None]:
    """Write what a command is ``doing``, once, if the block is not left within :data:`SECONDS`."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):  # there is no stream, or no thread can be started
            if wanted:
                _start(stack, f"patches: {doing} ...\n".encode(errors="backslashreplace"))
        yield


def _start(stack: contextlib.ExitStack, line: bytes) -> None:
    errors = os.dup(2)  # the stream itself is held back while packages are imported
    stack.callback(os.close, errors)

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(errors, line)

    timer = threading.Timer(SECONDS, write)
    timer.daemon = True
    timer.start()
    # The last callback is called first: the timer is cancelled, has ended, and then the stream is closed.
    stack.callback(timer.join)
    stack.callback(timer.cancel)
