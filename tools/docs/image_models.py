"""The table of ``docs/image_models.md``, from what ``make image-models`` has found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import DOCS
from .architectures import AS_PLAIN, Result, cell, is_judged

RESULTS = DOCS / "image_models.json"
PRECISIONS = ("NF4", "NF4, nested", "INT8")


def wrong_steps(result: Result) -> dict[tuple[str, str], str]:
    """What is wrong, by precision and step; what the model does without quantization too is not."""
    return {(precision, step): text for precision in PRECISIONS for step, text in result.get(precision, {}).items()
            if text and not text.startswith(AS_PLAIN)}  # fmt: skip


def is_right(result: Result) -> bool:
    return is_judged(result) and not wrong_steps(result)
