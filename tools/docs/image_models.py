"""The tables of ``docs/image_models.md``, from what ``make image-models`` has found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.image_models import STEPS

from . import DOCS
from .architectures import AS_PLAIN, counts, is_judged, not_judged, wrong_rows

RESULTS = DOCS / "image_models.json"
PRECISIONS = ("NF4", "NF4, nested", "INT8")
WAYS = ("unpatched", "patched")


def fragment() -> str:
    """Markdown: how many are right, at which step, which are not, and which could not be judged."""
    from tests.image_models.faults import FAULTS

    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    judged = {name: entry for name, entry in known.items() if "patched" in entry}
    parts = (counts(judged), _by_step(judged), wrong_rows(judged, FAULTS), not_judged(judged))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _by_step(judged: Mapping[str, Any]) -> Iterator[str]:
    """Of how many classes each step is right, without the plugin and with it, of those judged both ways."""
    both = [entry for entry in judged.values() if all(way in entry and is_judged(entry[way]) for way in WAYS)]
    yield "| right without the plugin, and with it, of | " + " | ".join(PRECISIONS) + " |"
    yield "|---|" + "---|" * len(PRECISIONS)
    for step in STEPS:
        yield f"| {step} | " + " | ".join(_right(both, precision, step) for precision in PRECISIONS) + " |"


def _right(both: list[Mapping[str, Any]], precision: str, step: str) -> str:
    pairs = [tuple(entry[way].get(precision, {}).get(step, AS_PLAIN) for way in WAYS) for entry in both]
    run = [pair for pair in pairs if not any(text.startswith(AS_PLAIN) for text in pair)]
    return f"{sum(not pair[0] for pair in run)}, {sum(not pair[1] for pair in run)} of {len(run)}" if run else ""
