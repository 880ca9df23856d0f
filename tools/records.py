"""JSON for results that are kept in the repository: one line a record, so that a diff names what has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dumps(records: Mapping[str, Any]) -> str:
    """Return ``records`` by their names in order, as JSON with a line for each."""
    lines = (f"{json.dumps(name, ensure_ascii=False)}: {_line(records[name])}" for name in sorted(records))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, sort_keys=True)
