"""What the plugin logs meanwhile: what the reproducers of silent defects measure."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from ...process.messages import LOGGER


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def record_logs() -> Iterator[list[logging.LogRecord]]:
    """The records that the plugin logs meanwhile; no other handler gets them."""
    recorder = _Recorder()
    propagate, LOGGER.propagate = LOGGER.propagate, False
    LOGGER.addHandler(recorder)
    try:
        yield recorder.records
    finally:
        LOGGER.removeHandler(recorder)
        LOGGER.propagate = propagate
