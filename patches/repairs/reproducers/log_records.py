"""The records that a logger gets while a reproducer runs."""

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
def record_logs(logger: logging.Logger = LOGGER) -> Iterator[list[logging.LogRecord]]:
    """Yield the records that ``logger``, or the plugin, logs meanwhile; no other handler gets them."""
    recorder = _Recorder()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(recorder)
    try:
        yield recorder.records
    finally:
        logger.removeHandler(recorder)
        logger.propagate = propagate
