"""The tables in ``docs/releases.md`` of how many patches an upgrade leaves applied, from what ``make replay`` has counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.replay import COUNTS, OLDEST, STEPS
from tools.stacks import series

Row = Mapping[str, Any]


def fragment() -> str:
    """Markdown: the average of all upgrades, and each upgrade to another series."""
    rows: list[Row] = json.loads(COUNTS.read_text("utf-8"))
    return "\n".join([*_averages(rows), "", *_upgrades(rows), ""])


def _counted(rows: Sequence[Row]) -> list[str]:
    return [package for package in OLDEST if any(row["package"] == package for row in rows)]


def _averages(rows: Sequence[Row]) -> Iterator[str]:
    yield "| package | releases | one later | two later | four later | one later, into another series | edited functions alone |"
    yield "|---" * 7 + "|"
    for package in _counted(rows):
        own = [row for row in rows if row["package"] == package]
        next_ones = [row for row in own if row["step"] == 1]
        cells = [_share([row for row in own if row["step"] == step]) for step in STEPS]
        span = f"{next_ones[0]['known']} to {next_ones[-1]['new']}"
        cells += [_share([*filter(_is_other_series, next_ones)]), _share(next_ones, "edits_unchanged")]
        yield f"| {package} | {len(next_ones) + 1}: {span} | {' | '.join(cells)} |"


def _upgrades(rows: Sequence[Row]) -> Iterator[str]:
    yield "| package | applied after the upgrade to the next series |"
    yield "|---|---|"
    for package in _counted(rows):
        steps = [row for row in rows if row["package"] == package and row["step"] == 1 and _is_other_series(row)]
        said = [f"{row['new']}: {row['applied']} of {row['of']}" for row in steps]
        yield f"| {package} | {', '.join(said)} |"


def _is_other_series(row: Row) -> bool:
    return series(row["known"]) != series(row["new"])


def _share(rows: Sequence[Row], what: str = "applied") -> str:
    return f"{sum(row[what] / row['of'] for row in rows) / len(rows):.0%}" if rows else "-"
