"""What a patch is for, in words: the same on the site and in the table of the README."""

from __future__ import annotations

import re

from packaging.requirements import Requirement

from patches import Patch
from patches.engine import Part


def releases(patch: Patch) -> str:
    """``bitsandbytes 0.46.1 to 0.50.2``: where the defect is; an end without "below" is the last one tested."""
    by_range: dict[str, list[str]] = {}
    for part in patch.parts:
        by_range.setdefault(_range(part), []).append(part.name)
    if len(by_range) == 1:
        return next(iter(by_range))
    return "; ".join(f"{' and '.join(names)}: {found}" for found, names in by_range.items())


def _range(part: Part) -> str:
    first, *others = map(Requirement, part.requires)
    bounds = {s.operator: s.version for s in first.specifier}
    until = f"to below {bounds['<']}" if "<" in bounds else f"to {bounds.get('<=', part.tested_up_to)}"
    words = " ".join(filter(None, [first.name, bounds.get(">="), until]))
    return ", ".join([words + _except(first), *map(_other, others)])


def link(url: str) -> str:
    """A Markdown link that says which issue or pull request it is, or that it is a line of source."""
    found = re.search(r"github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", url)
    return f"[{found[1]} #{found[2]}]({url})" if found else f"[source]({url})"


def _other(requirement: Requirement) -> str:
    """``torch from 2.6``, ``bitsandbytes from 0.46.1 except 0.47.0``: what else must hold."""
    bounds = sorted(str(s) for s in requirement.specifier if s.operator != "!=")
    return " ".join([requirement.name, *bounds]).replace(">=", "from ") + _except(requirement)


def _except(requirement: Requirement) -> str:
    excluded = sorted(s.version for s in requirement.specifier if s.operator == "!=")
    return f" except {' and '.join(filter(None, [', '.join(excluded[:-1]), *excluded[-1:]]))}" if excluded else ""
