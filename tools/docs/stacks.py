"""The table of whole stacks in ``docs/releases.md``, from what ``make stacks`` has found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.stacks.flows import FLOWS, is_right
from tools.stacks import RESULTS, declared

PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes")
HOW = ("unpatched", "patched")
LEFT = "the defect is there, and is not repaired there"
"""What `verify` says of them."""
Found = Mapping[str, Any]


def fragment() -> str:
    """Markdown: what was run on each declared stack, and what is not right there."""
    known = json.loads(RESULTS.read_text("utf-8"))
    return "\n".join([*_stacks(known), "", *_graphs(known), "", *_flows(known), "", *_left(known), ""])


def _runs(known: Found) -> Iterator[tuple[str, str, Found]]:
    for name in declared():
        for torch, found in known.get(name, {}).items():
            if "verify" in found:
                yield name, torch, found


def _stacks(known: Found) -> Iterator[str]:
    titles = ["stack", "torch", *PACKAGES, "reproducers", "flows right, unpatched", "patched"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for name, torch, found in _runs(known):
        verdicts = Counter(row["verdict"] for row in found.get("verify", ()))
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        flows = found.get("flows", {})
        right = [sum(is_right(flow, answer[how]) for flow, answer in flows.items()) for how in HOW]
        packages = [found["versions"].get(package, "") for package in PACKAGES]
        counts = [f"{each} of {len(flows)}" if flows else "" for each in right]
        yield f"| {' | '.join([name, torch, *packages, said, *counts])} |"


def _graphs(known: Found) -> Iterator[str]:
    """The cells of the compiled train step."""
    cells = [flow for flow in FLOWS if ": graphs" in flow]
    yield "A compiled train step, in graphs without the plugin and with it; 1 passes `fullgraph=True` too."
    yield ""
    yield f"| stack | torch | {' | '.join(cell.replace(' graphs,', '') for cell in cells)} |"
    yield "|---" * (len(cells) + 2) + "|"
    for name, torch, found in _runs(known):
        if flows := found.get("flows"):
            said = [" → ".join(flows[cell][how].partition(":")[0] for how in HOW) for cell in cells]
            yield f"| {name} | {torch} | {' | '.join(said)} |"


def _flows(known: Found) -> Iterator[str]:
    """What is not right patched, with what it says; and each reproducer that is wrong."""
    rows = list(_not_right(known))
    yield (
        "Not right with the plugin (0 is the reference; of graphs 1):"
        if rows
        else "All flows are right with the plugin."
    )
    if rows:
        yield from ("", "| stack | torch | flow or patch | unpatched | patched |", "|---|---|---|---|---|", *rows)


def _not_right(known: Found) -> Iterator[str]:
    for name, torch, found in _runs(known):
        for flow, said in found.get("flows", {}).items():
            if not is_right(flow, said["patched"]):
                yield f"| {name} | {torch} | {flow} | {_cell(said['unpatched'])} | {_cell(said['patched'])} |"
        for row in found.get("verify", ()):
            if row["verdict"] == "wrong":
                yield f"| {name} | {torch} | `{row['id']}` | | {_cell(row['reason'])} |"


def _left(known: Found) -> Iterator[str]:
    """Defects that are there and out of range, and why."""
    yield "Defects that are there and are not repaired there:"
    yield ""
    for name, torch, found in _runs(known):
        ids = [f"`{row['id']}` ({row['reason'].partition(';')[0]})" for row in found["verify"] if LEFT in row["reason"]]
        yield f"- {name} on torch {torch}: {', '.join(ids) or 'none'}"


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""
