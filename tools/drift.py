"""What `nox -s newest` prints: which patch no longer fits the installed releases, and what to do about it.

``drift.py [ID ...]``, all patches by default. A release of the repaired package that is newer than `tested_up_to`
shows in the state of a patch; what a newer torch, or another neighbour, does to it shows only when its reproducer
runs, so all of them are run. Exits with 1 if there is work for a maintainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from patches import REGISTRY
from patches.engine import gate

Row = dict[str, Any]

CONFLICT = "the source changed where the patch edits it. Write an edit for the new source, with `when=` for each."
FAILED = "applying it raised, and all of it was undone. See `python -m patches diff {id}`."
FITS = "the defect is still there and the edits fit: raise `tested_up_to`, then run `python -m patches verify {id}`."
FIXED = "the defect is gone ({figure}): end the range in `requires` before this release."
NOT_SHOWN = (
    "its reproducer breaks off or finds nothing without the patch, on a release of {package} that has the defect: \
find which other package changed, and name it in `requires` or adapt `defect()`."
)
NOT_REPAIRED = "it goes in, and its reproducer contradicts it. Find which other package changed; adapt the patch."
OUTSIDE = "the defect is there outside of the range in `requires`: widen it."
FORGOTTEN = "If {package} {version} repairs it, end the range in `requires` before that release: one line in {file}."
UNSEEN = "`defect()` cannot tell here ({figure}): run `python -m patches verify {id}` on a host where it can."


def main(ids: list[str]) -> int:
    rows = patches("report", *ids)["results"]
    if not rows:
        print("no patch is registered: is this the repository of bnb-patches?", file=sys.stderr)
        return 2
    verified = {row["id"]: row for row in patches("verify", *ids)["rows"]}
    drifted = [row for row in rows if row["status"] in ("conflict", "failed", "untested")]
    if drifted:
        ids = [row["id"] for row in drifted]
        forced = {row["id"]: row for row in patches("report", *ids, PATCHES_UNTESTED="1")["results"]}
        for row in drifted:
            finding = verified[row["id"]]["findings"].get("unpatched")
            print(describe(row, advice(forced[row["id"]], finding)), end="\n\n")
    wrong = [row for row in rows if row not in drifted and verified[row["id"]]["verdict"] == "wrong"]
    for row in wrong:
        said = verified[row["id"]]
        print(describe({**row, "reason": said["reason"]}, contradiction(row, said["findings"])), end="\n\n")
    print(summary(rows, len(drifted) + len(wrong)))
    return 1 if drifted or wrong else 0


def patches(*command: str, **environment: str) -> dict[str, Any]:
    """What ``python -m patches COMMAND --json`` says in a fresh process."""
    arguments = [sys.executable, "-m", "patches", *command, "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **environment})
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.exit(f"`python -m patches {' '.join(command)}` broke off:\n{done.stderr}")


def advice(row: Row, finding: tuple[bool | None, str] | None) -> str:
    """What to do about a patch that drifted.

    ``row`` is its state when it is applied all the same; ``finding`` whether the unpatched release still has
    the defect (None: unknown) and the figure.
    """
    present, figure = finding or (None, "not run")
    if present is False:
        said = FIXED
    elif row["status"] == "conflict":
        said = CONFLICT
    elif row["status"] == "failed":
        said = FAILED
    else:
        said = FITS if present else UNSEEN
    return said.format(id=row["id"], figure=figure)


def contradiction(row: Row, findings: dict[str, tuple[bool | None, str]]) -> str:
    """What to do about a patch whose state is as it should be, and whose reproducer says otherwise."""
    if row["status"] == "not affected":
        return OUTSIDE
    said = NOT_REPAIRED if findings["unpatched"][0] else NOT_SHOWN
    return said.format(package=next(iter(row["versions"])))


def forgotten(row: Row) -> str:
    """What to add to a row of `verify` whose reproducer finds nothing without the patch; empty if it does find it."""
    if row["findings"].get("unpatched", (None,))[0] is not False:
        return ""
    patch = REGISTRY.patches[row["id"]]
    file = sys.modules[patch.module].__file__
    return " " + FORGOTTEN.format(package=patch.package, version=gate.installed_version(patch.package), file=file)


def describe(row: Row, todo: str) -> str:
    """One patch that drifted, in words: what, on which releases, why, what to do, where to look."""
    found = ", ".join(f"{name} {version or 'absent'}" for name, version in row["versions"].items())
    lines = [
        f"{row['id']}: {row['status'].upper()} on {found}",
        f"  repairs: {row['summary']}",
        f"  found:   {row['reason']}",
        f"  to do:   {todo}",
    ]
    return "\n".join(lines + [f"  see:     {link}" for link in row["links"]])


def summary(rows: list[Row], drifted: int) -> str:
    """The releases, how many patches are in each state, and whether there is anything to do."""
    versions = {name: version for row in rows for name, version in row["versions"].items() if version}
    states = [row["status"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    what = f"{drifted} to look at." if drifted else "Nothing to do."
    return f"on {', '.join(f'{n} {v}' for n, v in sorted(versions.items()))}\n{len(rows)} patches: {counts}. {what}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
