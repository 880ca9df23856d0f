"""What was measured, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from .run import ratio

TARGETS = {
    "nf4-checkpoint": 0.60,
    "nf4-dora-checkpoint": 0.45,
    "int8": 0.65,
    "int8-checkpoint": 0.65,
}
"""Step time, patched compiled over patched eager, that the project set itself for the size "small"."""


def write(stem: Path, data: dict[str, Any], table: str = "") -> None:
    """Put what was measured into ``<stem>.json``, and its ``table``, if there is one, into ``<stem>.md``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    if table:
        stem.with_suffix(".md").write_text(table + "\n")


def table(data: dict[str, Any]) -> str:
    """Everything that was measured, for a terminal or a Markdown page."""
    parts = [_heading(data)]
    for name, case in data.get("cases", {}).items():
        together = data.get("at_once", 1) > 1
        parts.append(f"{case['text']} ({name})\n\n{_case(case['results'], together)}")
        parts.append(_ratios(name, case["results"], data["size"], together))
    if cost := data.get("cost"):
        parts.append(_cost(cost))
    return "\n\n".join(parts)


def _heading(data: dict[str, Any]) -> str:
    host, size = data["host"], data["size_of"]
    return (
        f"Llama {size['layers']} x {size['hidden']}, sequence {size['sequence']}, batch {size['batch']}, "
        f"{data['dtype']}, {data['backend']}, {data['rounds']} rounds; {host['device']}, {host['threads']} threads, load {host['load']}"
        + ("; first calls ran at once and are no figures" if data.get("at_once", 1) > 1 else "")
    )


def _case(results: dict[str, dict[str, Any]], together: bool) -> str:
    first_calls = () if together else ("first call s", "CPU s")
    head = ("", "ms a step", "CPU ms", "of eager", "graphs", "breaks", "eager frames", *first_calls, "peak MiB")
    rows = []
    for name, r in results.items():
        if "error" in r:
            rows.append((name, f"failed: {r['error'][:80]}"))
            continue
        if not r.get("seconds") or "peak_mib" not in r:
            rows.append((name, "not finished"))
            continue
        eager = name.replace("compiled", "eager")
        compiled = name != eager
        counts = (r["graphs"], r["breaks"], r["eager_frames"]) if compiled else ("", "", "")
        of_eager = _number(ratio(results, name, eager)) if compiled else ""
        times = (f"{median(r[key]) * 1000:.1f}" for key in ("seconds", "cpu_s"))
        first = (f"{r[key]:.1f}" for key in ("first_s", "first_cpu_s") if not together)
        rows.append((name, *times, of_eager, *counts, *first, f"{r['peak_mib']:.0f}"))
    return markdown(head, rows)


def _ratios(name: str, results: dict[str, dict[str, Any]], size: str, together: bool) -> str:
    target = f"{TARGETS[name]:.2f}" if size == "small" and name in TARGETS else ""
    rows: list[tuple[Any, ...]] = [
        (text, *(_number(ratio(results, above, below, key)) for key in ("seconds", "cpu_s")), goal)
        for text, above, below, goal in (
            ("step, patched compiled / patched eager", "patched compiled", "patched eager", target),
            ("step, patched compiled / unpatched compiled", "patched compiled", "unpatched compiled", ""),
            ("step, patched eager / unpatched eager", "patched eager", "unpatched eager", "1.00"),
        )
    ]
    one, other = (results.get(f"{state} compiled", {}) for state in ("patched", "unpatched"))
    if not together and "error" not in one and "error" not in other and one and other:
        first = (_number(one[key] / other[key]) for key in ("first_s", "first_cpu_s"))
        rows.append(
            (
                "first call, patched compiled / unpatched compiled",
                *first,
                "0.50" if target and name == "nf4-checkpoint" else "",
            )
        )
    if limit := results.get("patched eager", {}).get("limit"):
        rows.insert(1, ("the same, if all that Inductor can compile took no time", "", _number(limit), ""))
    head = ("ratio", "of seconds", "of CPU seconds", *(("target",) if size == "small" else ()))
    return markdown(head, [row[: len(head)] for row in rows])


def _cost(cost: dict[str, Any]) -> str:
    i, registry = cost["import"], cost["registry"]
    rows = [
        (name, f"{c['unpatched']:.1f}", f"{c['patched']:.1f}", f"{c['overhead']:+.1f}", f"{c['ratio']:.3f}")
        for name, c in cost["calls"].items()
    ]
    return "\n".join(
        [
            "What the patches cost",
            markdown(("eager call, CPU us", "unpatched", "patched", "more", "ratio"), rows),
            "",
            f"import bitsandbytes: {i['without']:.3f} CPU s, with the entry point off {i['off']:.3f} s, "
            f"with autoload {i['autoload']:.3f} s: ratio {i['ratio']:.3f} (target 1.02)",
            f"apply() of {registry['patches']} patches: {registry['apply'] * 1000:.1f} ms, the first "
            f"{registry['first_apply'] * 1000:.1f} ms; revert() {registry['revert'] * 1000:.1f} ms",
        ]
    )


def markdown(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table for a Markdown page."""
    cells = [tuple(map(str, row)) + ("",) * (len(head) - len(row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    aligned = ["| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) + " |"
               for row in cells]  # fmt: skip
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([aligned[0], rule, *aligned[1:]])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
