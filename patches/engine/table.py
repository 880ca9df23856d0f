"""A plain text table that fits the terminal. Its last column wraps, the others do not."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def render(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """``rows`` under ``head``, columns aligned, at most ``width`` characters (the terminal's) wide."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    table = [tuple(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head) - 1)]
    room = max(24, width - sum(widths) - 2 * len(widths))
    lines = []
    for row in table:
        wrapped = textwrap.wrap(row[-1], room) or [""]
        left = "  ".join(cell.ljust(w) for cell, w in zip(row, widths))
        lines.append(f"{left}  {wrapped[0]}".rstrip())
        lines += [" " * (len(left) + 2) + more for more in wrapped[1:]]
    lines.insert(1, "-" * min(width, max(map(len, lines))))
    return "\n".join(lines)
