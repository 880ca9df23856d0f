"""The table of README.md, from what the site knows: ``make readme`` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from tools.docs import symptoms

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- counts: written by `make readme` -->", "<!-- end -->"


def table() -> str:
    """A Markdown table, one row a group of symptoms: how many patches, and how many of these defects say nothing."""
    known = symptoms.read_symptoms()
    rows = ["| what goes wrong | patches | of these silent |", "|---|---|---|"]
    for key, title in known.groups.items():
        own = {patch_id for patch_id, groups in known.groups_of.items() if key in groups}
        rows.append(f"| {title} | {len(own)} | {len(own & known.silent)} |")
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
