"""The table of whole stacks in ``docs/releases.md``, from what ``make stacks`` has found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.stacks.flows import is_right
from tools.stacks import RESULTS, declared

PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes")
HOW = ("unpatched", "patched")
Found = Mapping[str, Any]


def fragment() -> str:
    """Markdown: what was run on each declared stack, and what is not right there."""
    known = json.loads(RESULTS.read_text("utf-8"))
    return "\n".join([*_stacks(known), "", *_flows(known), ""])


def _runs(known: Found) -> Iterator[tuple[str, str, Found]]:
    for name in declared():
        for torch, found in known.get(name, {}).items():
            yield name, torch, found


def _stacks(known: Found) -> Iterator[str]:
    titles = ["stack", "torch", *PACKAGES, "reproducers", "flows right, unpatched", "patched"]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for name, torch, found in _runs(known):
        verdicts = Counter(row["verdict"] for row in found["verify"])
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        flows = found["flows"]
        right = [sum(is_right(flow, answer[how]) for flow, answer in flows.items()) for how in HOW]
        packages = [found["versions"].get(package, "") for package in PACKAGES]
        cells = [name, torch, *packages, said, *(f"{each} of {len(flows)}" for each in right)]
        yield f"| {' | '.join(cells)} |"


def _flows(known: Found) -> Iterator[str]:
    """What is not right patched, with what it says; and each reproducer that is wrong."""
    yield "Not right with the plugin (0 is the reference; of graphs 1):"
    yield ""
    yield "| stack | torch | flow or patch | unpatched | patched |"
    yield "|---|---|---|---|---|"
    for name, torch, found in _runs(known):
        for flow, said in found["flows"].items():
            if not is_right(flow, said["patched"]):
                yield f"| {name} | {torch} | {flow} | {_cell(said['unpatched'])} | {_cell(said['patched'])} |"
        for row in found["verify"]:
            if row["verdict"] == "wrong":
                yield f"| {name} | {torch} | `{row['id']}` | | {_cell(row['reason'])} |"


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""
