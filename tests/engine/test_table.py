"""Tables that fit the terminal and the notebook, and what a report shows in them."""

from __future__ import annotations

import html.parser

import pytest

from patches.engine import table
from patches.engine.report import Report, Result, Status

LONGEST = "bitsandbytes-linear4bit-sharded-state-dict"
WORDS = "load_state_dict of its own state_dict: Loading a quantized checkpoint into a non-quantized Linear8bitLt"


def report(*statuses: Status, reason: str = WORDS) -> Report:
    return Report(tuple(Result(f"{LONGEST[:-2]}{n:02}", "what is broken", s, reason) for n, s in enumerate(statuses)))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_text_is_squeezed_into_a_column(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = str(report(*[Status.NOT_AFFECTED] * 3)).splitlines()
    left = f"not affected  {LONGEST}"
    assert max(map(len, shown)) <= max(width, len(left))
    lines_of_a_row = (len(shown) - 2) // 3  # the end is an empty line and the summary
    assert lines_of_a_row <= 1 + -(-len(WORDS) // (width - 20))
    row = shown[:lines_of_a_row]
    assert row[0].startswith(left[:-2]) and " ".join(" ".join(row).split()).endswith(WORDS)


def test_a_detail_that_fits_stays_on_the_line_and_others_are_below():
    rows = [
        table.Row(("ok", "first"), ("12 of 12", "0 of 12")),
        table.Row(("skipped", "second"), ("a" * 30, "b " * 20)),
    ]
    assert table.text(rows, "2 patches", width=40).splitlines() == [
        "ok       first   12 of 12; 0 of 12",
        "skipped  second",
        "    " + "a" * 30,
        "    " + "b " * 17 + "b",
        "        b b",
        "",
        "2 patches",
    ]


def test_what_needs_attention_is_last_in_text_and_first_in_a_notebook():
    shown = report(Status.CONFLICT, Status.APPLIED, Status.SHADOWED, Status.PENDING, Status.APPLIED, reason="")
    text = str(shown).splitlines()
    assert [
        line.split()[0] for line in text if LONGEST[:-2] in line
    ] == "applied applied pending conflict shadowed".split()
    assert text[-1] == "5 patches: 2 applied, 1 pending, 1 conflict, 1 shadowed"
    assert text[3] == "", "and set apart"
    assert "without it: what is broken" in text[4], "with what that means for the user"
    rows = shown._repr_html_().split("<tr>")
    assert "<b>conflict</b>" in rows[2] and "<b>shadowed</b>" in rows[3] and "<b>" not in "".join(rows[4:])


def test_an_empty_report_and_one_patch():
    assert str(Report(())) == "0 patches"
    assert str(report(Status.APPLIED, reason="")).splitlines()[-1] == "1 patch: 1 applied"


class _Reader(html.parser.HTMLParser):
    """The cells of a table, and whether each tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_in_a_notebook_it_is_a_table_whatever_stands_in_it():
    """Names such as ``<lambda>`` and ``'<'`` stand in reasons; and the page may be dark or light."""
    evil = "<script>alert('&amp;')</script> <lambda> is not \"ours\""
    source = Report((Result("a", "<b>", Status.SHADOWED, evil, notes=(evil,)),), notes=(evil,))._repr_html_()
    read = _Reader(source)
    assert read.cells == ["status", "patch", "why", "without it", "shadowed", "a", evil, "<b>"]
    assert read.tags == {"p", "table", "tr", "th", "td", "b"}
    assert not any(word in source.lower() for word in ("color", "background", "src=", "href=", "class="))
