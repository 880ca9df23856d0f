"""What to do about a patch that does not hold on the installed releases, in words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from patches import REGISTRY
from patches.engine import gate
from patches.engine.patch import Part
from patches.engine.report import Status
from patches.verification import Row

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
BROKEN_OFF = "its reproducer breaks off without the patch ({figure}): adapt `defect()`, or report the error upstream."
_BY_STATE = {Status.CONFLICT: CONFLICT, Status.FAILED: FAILED}


class Advice(NamedTuple):
    """The state of a part in a word or two, and what to do about it."""

    state: str
    to_do: str


def holds(row: Row) -> bool:
    """Whether the defect is there without the patch, gone with it alone and with all, and back after revert."""
    return row.verdict == "ok" and len(row.findings) > 1


def advice(row: Row, part: Part, newer: bool) -> Advice | None:
    """What to do about a part that does not hold; None if there is nothing to do about it.

    ``newer``: whether its package is newer than its `tested_up_to`. Otherwise another package has changed.
    """
    if row.verdict == "cannot show" and newer:
        state, said, figure = "cannot show", UNSEEN, row.reason
    elif row.verdict != "wrong":
        return None
    else:
        state, said, figure = *(_of_newer if newer else _of_tested)(row), row.findings["unpatched"][1]
    return Advice(state, said.format(id=row.id, figure=figure, package=part.package))


def _of_newer(row: Row) -> tuple[str, str]:
    present, _ = row.findings["unpatched"]
    if present is False:
        return "repaired upstream", FIXED
    return _not_applied(row) or (("wrong", NOT_REPAIRED) if present else ("breaks off", BROKEN_OFF))


def _of_tested(row: Row) -> tuple[str, str]:
    present, _ = row.findings["unpatched"]
    if present and len(row.findings) == 1:
        return "outside of its range", OUTSIDE
    return _not_applied(row) or ("wrong", NOT_REPAIRED if present else NOT_SHOWN)


def _not_applied(row: Row) -> tuple[str, str] | None:
    """The state of a patch that could not be applied, and what to do."""
    _, figure = row.findings.get("patched", (None, ""))
    return next(((str(state), to_do) for state, to_do in _BY_STATE.items() if figure.startswith(f"{state}: ")), None)


def forgotten(row: dict[str, Any]) -> str:
    """What to add to a row of `verify` whose reproducer finds nothing without the patch; empty if it does find it."""
    if row["findings"].get("unpatched", (None,))[0] is not False:
        return ""
    patch = REGISTRY.patches[row["id"]]
    file = sys.modules[patch.module].__file__
    return " " + FORGOTTEN.format(package=patch.package, version=gate.installed_version(patch.package), file=file)


def describe(row: Row, part: Part, said: Advice) -> str:
    """One part that needs a maintainer, in words: what, on which releases, why, what to do, where to look."""
    found = ", ".join(f"{name} {gate.installed_version(name) or 'absent'}" for name in gate.packages(part))
    patch = REGISTRY.patches[row.id]
    lines = [
        f"{row.name}: {said.state.upper()} on {found}",
        f"  repairs: {patch.summary}",
        f"  found:   {_found(row)}",
        f"  to do:   {said.to_do}",
    ]
    return "\n".join(lines + [f"  see:     {link}" for link in patch.links])


def _found(row: Row) -> str:
    """What the runs of a reproducer said, those together that said the same."""
    said: dict[str, list[str]] = {}
    for phase, (present, figure) in row.findings.items():
        said.setdefault(figure or ("present" if present else "absent"), []).append(phase)
    return "; ".join(f"{', '.join(phases)}: {figure}" for figure, phases in said.items()) or row.reason


def summary(rows: Sequence[Row], to_do: int) -> str:
    """The releases, how many reproducers have each verdict, and whether there is anything to do."""
    names = {name for row in rows for part in REGISTRY.patches[row.id].parts for name in gate.packages(part)}
    versions = {name: version for name in sorted(names) if (version := gate.installed_version(name))}
    verdicts = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    what = f"{to_do} to look at." if to_do else "Nothing to do."
    return f"on {', '.join(f'{n} {v}' for n, v in versions.items())}\n{len(rows)} reproducers: {counts}. {what}"
