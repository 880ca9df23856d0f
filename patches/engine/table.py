"""Tables: as text that fits the terminal, and as HTML for a notebook."""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

INDENT = "    "


class Row(NamedTuple):
    """A line: cells that stand in columns, then details, which get lines of their own where they do not fit."""

    cells: Sequence[str]
    details: Sequence[str] = ()
    loud: bool = False
    """It needs attention: text has it at the end, where the reader is, HTML at the top and in bold."""


def text(rows: Sequence[Row], summary: str, width: int | None = None) -> str:
    """Set the calm rows, the loud ones, and the summary, in at most ``width`` characters (the terminal's)."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    columns = [max(map(len, column)) for column in zip(*(row.cells for row in rows))]
    if sum(columns) + 2 * (len(columns) - 1) > width:
        columns = [0] * len(columns)  # too narrow to align anything
    blocks = ([row for row in rows if not row.loud], [row for row in rows if row.loud])
    parts = ["\n".join(line for row in block for line in _lines(row, columns, width)) for block in blocks if block]
    return "\n\n".join([*parts, wrapped(summary, width)])


def wrapped(line: str, width: int | None = None, indent: str = "") -> str:
    """``line`` in at most ``width`` characters (the terminal's), what follows its first line indented more."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    return textwrap.fill(
        line, max(20, width), initial_indent=indent, subsequent_indent=indent + INDENT, break_on_hyphens=False
    )


def _lines(row: Row, columns: Sequence[int], width: int) -> list[str]:
    left = "  ".join(cell.ljust(column) for cell, column in zip(row.cells, columns))
    details = [" ".join(detail.split()) for detail in row.details if detail.strip()]
    whole = f"{left}  {'; '.join(details)}".rstrip()
    if len(whole) <= width:
        return [whole]
    return [left.rstrip(), *(wrapped(detail, width, INDENT) for detail in details)]


def as_html(head: Sequence[str], rows: Iterable[Row], summary: str) -> str:
    """Set the rows as an HTML table, in the colours of the page around it."""
    ordered = sorted(rows, key=lambda row: not row.loud)
    lines = [_tr("th", head), *(_tr("td", (*row.cells, "; ".join(row.details)), row.loud) for row in ordered)]
    return "\n".join([f"<p>{html.escape(summary)}</p>", "<table>", *lines, "</table>"])


def _tr(tag: str, cells: Iterable[str], loud: bool = False) -> str:
    before, after = ("<b>", "</b>") if loud else ("", "")
    shown = (f'<{tag} style="text-align: left">{before}{html.escape(cell)}{after}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def total(words: Sequence[str], order: Sequence[str], nouns: tuple[str, str] = ("patch", "patches")) -> str:
    """ "47 patches: 41 applied, 6 pending": how many there are, and how often each of ``order`` is among them."""
    counts = ", ".join(f"{words.count(word)} {word}" for word in order if word in words)
    return f"{len(words)} {nouns[len(words) != 1]}" + (f": {counts}" if counts else "")
