"""How a number of bytes is written, in messages and tables."""

from __future__ import annotations


def format_bytes(number: int) -> str:
    """Return ``number`` bytes in the largest unit in which they are at least one."""
    size, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
