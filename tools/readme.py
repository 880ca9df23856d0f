"""The patch table of README.md, from the registry: ``make readme`` writes it, a test compares it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from patches import REGISTRY, Patch

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- patches: written by `make readme` -->", "<!-- end -->"


def table(patches: Iterable[Patch]) -> str:
    """A Markdown table, one row a patch."""
    rows = ["| patch | releases | without it | upstream |", "|---|---|---|---|"]
    for patch in patches:
        links = " ".join(map(_link, patch.links))
        rows.append(f"| `{patch.id}` | {_releases(patch)} | {patch.summary} | {links} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """``text`` of the README with the table between its two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"README.md has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(REGISTRY.patches.values())}\n{END}{after}"


def _releases(patch: Patch) -> str:
    """``bitsandbytes 0.46.1 to 0.50.2``: where the defect is; an end without "below" is the last one tested."""
    first, *others = map(Requirement, patch.requires)
    bounds = {s.operator: s.version for s in first.specifier}
    until = f"to below {bounds['<']}" if "<" in bounds else f"to {bounds.get('<=', patch.tested_up_to)}"
    words = " ".join(filter(None, [first.name, bounds.get(">="), until]))
    return ", ".join([words, *map(_other, others)])


def _other(requirement: Requirement) -> str:
    """``torch from 2.6``, ``bitsandbytes from 0.46.1 except 0.47.*``: what else must hold."""
    bounds = sorted(requirement.specifier, key=lambda s: (s.operator == "!=", str(s)))
    return " ".join([requirement.name, *map(str, bounds)]).replace(">=", "from ").replace("!=", "except ")


def _link(url: str) -> str:
    found = re.search(r"github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", url)
    return f"[{found[1]} #{found[2]}]({url})" if found else f"[source]({url})"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
