"""The patch table of README.md, from the registry: ``make readme`` writes it, a test compares it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from patches import REGISTRY, Patch
from tools.docs.words import link, releases

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- patches: written by `make readme` -->", "<!-- end -->"


def table(patches: Iterable[Patch]) -> str:
    """A Markdown table, one row a patch."""
    rows = ["| patch | releases | without it | upstream |", "|---|---|---|---|"]
    for patch in patches:
        links = " ".join(map(link, patch.links))
        rows.append(f"| `{patch.id}` | {releases(patch)} | {patch.summary} | {links} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """``text`` of the README with the table between its two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"README.md has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(REGISTRY.patches.values())}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
