"""The table of README.md, from what the site knows: ``make readme`` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from patches import REGISTRY, symptoms

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- counts: written by `make readme` -->", "<!-- end -->"


def table() -> str:
    """A Markdown table, one row a group of symptoms: how many patches, and how many of these defects say nothing."""
    rows = [
        "| what goes wrong | patches that repair it | of these silent | patches that only warn |",
        "|---|---|---|---|",
    ]
    for key, title in symptoms.GROUPS.items():
        own = [patch for patch in REGISTRY.patches.values() if key in patch.groups]
        repairs = [patch for patch in own if patch.effect == "repairs"]
        warns = sum(patch.effect == "warns" for patch in own)
        rows.append(f"| {title} | {len(repairs)} | {sum(patch.silent for patch in repairs)} | {warns} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """``text`` of the README with the table between its two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"README.md has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text("utf-8")), "utf-8")
