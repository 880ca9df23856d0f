"""``make replay``: how long the plugin would have lasted, for each past release of the packages that it repairs.

The table of sources is made as if it ended at a release, and one, two and four releases later it is counted how many of
the patches of the package would be applied, because their source is known. ``tools.replay.verified`` has run their
reproducers on these releases: what was applied must hold there. Writes ``docs/replay_counts.json``, which
``docs/releases.md`` is built from.

A patch counts if it is for both releases. Its edits are those for the release where the table ends: nobody could write
those for a later one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from patches.engine import definitions
from patches.engine.patch import Part
from patches.newer_releases.source_table import SourceTable
from tools.commands import Failed
from tools.replay import COUNTS, OLDEST, STEPS, verified
from tools.sources import replayed
from tools.sources.gathered import Gathered, edited, is_for, parts


class Step(NamedTuple):
    """One upgrade: from the release where the table ends to a later one."""

    package: str
    known: str
    new: str
    step: int
    applied: tuple[str, ...]
    """Keys of the parts whose source is known."""
    left_out: tuple[str, ...]
    edits_unchanged: int
    """The number of parts of whom all edited functions are as before."""
    wrong: tuple[str, ...]
    """Those of ``applied`` that do not hold, where they were run."""
    is_verified: bool


def main() -> int:
    gathered = Gathered()
    run = replayed.by_release()
    releases = {package: verified.chosen(package, verified.offered(package))[::-1] for package in OLDEST}
    steps = [step for package in OLDEST for step in replay(package, releases[package], gathered, run)]
    COUNTS.write_text(as_json(steps), "utf-8")
    for package in OLDEST:
        for step in STEPS:
            of_step = [each for each in steps if (each.package, each.step) == (package, step)]
            print(f"{package}, {step} later: {share(of_step):.0%} of {len(of_step)} upgrades", flush=True)
    for each in steps:
        for key in each.wrong:
            print(f"WRONG: {key}: applied on {each.package} {each.new} with the table of {each.known}")
    return 1 if any(each.wrong for each in steps) else 0


def replay(package: str, known: Sequence[str], gathered: Gathered, run: Mapping[str, Any]) -> Iterator[Step]:
    """Give each upgrade between ``known`` releases, the oldest first, by one, two and four of them."""
    own = [part for part in parts() if part.package == package]
    for at, last in enumerate(known):
        table = gathered.table({package: known[: at + 1]}, replayed.failed())
        for step in STEPS:
            if at + step < len(known):
                yield _step(package, last, known[at + step], step, own, table, gathered, run)


def _step(
    package: str,
    last: str,
    new: str,
    step: int,
    own: Sequence[Part],
    table: Mapping[str, Any],
    gathered: Gathered,
    run: Mapping[str, Any],
) -> Step:
    def digests(module: str, names: Sequence[str]) -> Mapping[str, str]:
        tree = gathered.names(package, new).tree(module)
        return {name: definitions.digest(tree, name) for name in names}

    sources = SourceTable(digests, lambda: table)
    found = {part.key: sources.compare(part, last) for part in own if is_for(part, last) and is_for(part, new)}
    edits = {part.key: edited(part) for part in own}
    applied = tuple(key for key, each in found.items() if each.is_known)
    said = run.get(f"{package}=={new}", {})
    wrong = replayed.wrong(said)
    return Step(
        package,
        last,
        new,
        step,
        applied,
        tuple(key for key in found if key not in applied),
        sum(not edits[key].intersection(each.different) for key, each in found.items()),
        tuple(key for key in applied if key in wrong),
        bool(said),
    )


def share(steps: Sequence[Step]) -> float:
    """Return which share of the patches is applied, on average over the upgrades."""
    shares = [len(each.applied) / (len(each.applied) + len(each.left_out)) for each in steps]
    return sum(shares) / len(shares) if shares else 0.0


def as_json(steps: Sequence[Step]) -> str:
    rows = ",\n".join(
        json.dumps(
            {
                "package": each.package,
                "known": each.known,
                "new": each.new,
                "step": each.step,
                "applied": len(each.applied),
                "of": len(each.applied) + len(each.left_out),
                "edits_unchanged": each.edits_unchanged,
                "left_out": each.left_out if each.step == 1 else (),
                "verified": each.is_verified,
                "wrong": each.wrong,
            }
        )
        for each in steps
    )
    return f"[\n{rows}\n]\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
