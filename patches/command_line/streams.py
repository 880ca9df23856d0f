"""The standard streams of a command: the answer alone on standard output, whatever libraries print or close."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO


def fill() -> None:
    """Open what the shell has closed (``2>&-``), else the next file that anybody opens would stand in for it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def reserve_output() -> TextIO:
    """Return a stream to standard output, which from now on leads to standard error for all others in this process.

    At the level of descriptors, so that it holds for C as well; for good, since what buffers of C hold and what
    is printed at exit come after us. What the encoding cannot say is written as an escape.
    """
    sys.stdout.flush()
    os.environ["COLUMNS"] = str(shutil.get_terminal_size((120, 24)).columns)  # tables ask, and would ask the other one
    ours = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return ours


def write(stream: TextIO, text: str) -> None:
    """Write and flush. A reader that has seen enough (``| head``) is no error; a full disk is an `OSError`."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for the buffer: at exit Python would try again, and complain
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise
