"""The standard streams of a command: the answer alone on standard output, whatever libraries print or close."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

_MOST = 20_000
"""Bytes of what was held back that are shown."""


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


class HeldBack:
    """What was written to standard output and standard error meanwhile."""

    def __init__(self, errors: TextIO) -> None:
        self.errors = errors
        """A stream to the true standard error."""
        self.text = ""
        """What was written, its end if it is long; filled in at the end."""


@contextlib.contextmanager
def hold_back() -> Iterator[HeldBack]:
    """Keep what libraries write inside of the block, from Python, from C and in other processes, in a file.

    An exception that leaves the block shows it, but not one that asks the command to end.
    """
    _flush()
    true_streams = [os.dup(1), os.dup(2)]
    with (
        tempfile.TemporaryFile() as file,
        os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace") as errors,
    ):
        held = HeldBack(errors)
        try:
            with _crashes_shown(errors):
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                yield held
        except Exception:
            _flush()
            errors.write(_end_of(file.fileno()))
            raise
        finally:
            _flush()
            for number, true_stream in zip((1, 2), true_streams):
                os.dup2(true_stream, number)
                os.close(true_stream)
        held.text = _end_of(file.fileno())


@contextlib.contextmanager
def _crashes_shown(errors: TextIO) -> Iterator[None]:
    """Let a crash in C say where it was on the true standard error."""
    if faulthandler.is_enabled():  # by whoever runs us, to where they look
        yield
        return
    faulthandler.enable(errors)
    try:
        yield
    finally:
        faulthandler.disable()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _end_of(descriptor: int) -> str:
    size = os.lseek(descriptor, 0, os.SEEK_END)
    os.lseek(descriptor, max(0, size - _MOST), os.SEEK_SET)
    return os.read(descriptor, _MOST).decode(errors="replace")
