"""The table of ``docs/architectures.md``, from what ``make architectures`` has found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import DOCS

RESULTS = DOCS / "architectures.json"
AS_PLAIN = "without quantization"
Result = Mapping[str, Any]


def fragment() -> str:
    """Markdown: how many are right, which are not, and which could not be judged."""
    known: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    judged = {name: entry for name, entry in known.items() if "patched" in entry}
    from tests.architectures.faults import FAULTS

    return "\n".join([*counts(judged), "", *wrong_rows(judged, FAULTS), "", *not_judged(judged), ""])


def wrong_steps(result: Result) -> dict[tuple[str, str], str]:
    """What is wrong, by precision and step; what the model does without quantization too is not."""
    return {(precision, step): text for precision, steps in result.items() if isinstance(steps, dict)
            for step, text in steps.items() if text and not text.startswith(AS_PLAIN)}  # fmt: skip


def is_judged(result: Result) -> bool:
    """Whether a tiny model was built, and every step of it was run."""
    return "not built" not in result and "ended" not in result


def is_right(result: Result) -> bool:
    return is_judged(result) and not wrong_steps(result)


def counts(judged: Mapping[str, Any]) -> Iterator[str]:
    """How many were judged, by what they are for."""
    yield "| | classes | judged | right with the plugin | run without it, too | of these right |"
    yield "|---|---|---|---|---|---|"
    purposes = dict.fromkeys(name.partition(":")[0] for name in judged)
    for purpose in sorted(purposes):
        own = [entry for name, entry in judged.items() if name.partition(":")[0] == purpose]
        run = [entry["patched"] for entry in own if is_judged(entry["patched"])]
        both = [entry["unpatched"] for entry in own if "unpatched" in entry and is_judged(entry["unpatched"])]
        counts = (len(own), len(run), sum(map(is_right, run)), len(both), sum(map(is_right, both)))
        yield f"| {purpose} | {' | '.join(map(str, counts))} |"


def wrong_rows(judged: Mapping[str, Any], faults: Mapping[str, str]) -> Iterator[str]:
    """What is not right with the plugin; ``faults`` say why, by class."""
    yield "| not right with the plugin | what is wrong | without the plugin | whose fault |"
    yield "|---|---|---|---|"
    for name, entry in judged.items():
        if is_judged(entry["patched"]) and (wrong := wrong_steps(entry["patched"])):
            said = "; ".join(f"{precision}, {step}: `{text}`" for (precision, step), text in wrong.items())
            before = "not run" if "unpatched" not in entry else f"{len(wrong_steps(entry['unpatched']))} steps wrong"
            kind = name.partition(": ")[2].partition(" ")[0]
            yield f"| {name} | {cell(said)} | {before} | {faults.get(kind, 'not known')} |"


def not_judged(judged: Mapping[str, Any]) -> Iterator[str]:
    """What no tiny model was built of, or was not done."""
    yield "| not judged | why |"
    yield "|---|---|"
    for name, entry in judged.items():
        if not is_judged(entry["patched"]):
            yield f"| {name} | `{cell(entry['patched'].get('not built') or entry['patched']['ended'])}` |"


def cell(text: str) -> str:
    """``text`` in a cell of a table."""
    return text.replace("|", "\\|")
