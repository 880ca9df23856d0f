"""What the plugin says to a user while it works, and hearing it: what the reproducers of silent defects measure."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

LOGGER = logging.getLogger("bnb_patches")


class _Ear(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def heard() -> Iterator[list[logging.LogRecord]]:
    """The records that the plugin logs meanwhile; nobody else gets them."""
    ear = _Ear()
    propagate, LOGGER.propagate = LOGGER.propagate, False
    LOGGER.addHandler(ear)
    try:
        yield ear.records
    finally:
        LOGGER.removeHandler(ear)
        LOGGER.propagate = propagate
