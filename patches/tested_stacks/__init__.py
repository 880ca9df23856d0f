"""Compare the installed packages with the whole stacks that the plugin was run on: the nearest, and packages that are too old.

``table.json`` is made from ``tests/stacks/stacks.toml`` and from what ``make stacks`` has found.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from packaging.version import Version

from ..engine import gate, requirement
from ..engine.libraries import IMPORTED, Libraries

Stacks = Mapping[str, Mapping[str, list[str]]]
"""The releases of each package, by the name of the stack; more than one of torch where it was run with more."""
WEIGHTS = {
    "torch": 3.0,
    "transformers": 3.0,
    "peft": 2.0,
    "bitsandbytes": 2.0,
    "accelerate": 1.0,
    "trl": 0.5,
    "diffusers": 0.5,
}
"""The weight of another release of each package in the distance between stacks."""


class Nearest(NamedTuple):
    """A stack of the table, and for each package that is of another release: the installed one, the one that was run."""

    name: str
    others: Mapping[str, tuple[str, str]]

    def __str__(self) -> str:
        if not self.others:
            return f"these releases were tested together (stack {self.name!r} in docs/releases.md)"
        said = ", ".join(f"{package} {here} (tested: {run})" for package, (here, run) in self.others.items())
        return f"the nearest tested stack is {self.name}; not tested with it: {said}"


@functools.cache
def _table() -> Mapping[str, Any]:
    return json.loads(pkgutil.get_data(__name__, "table.json") or b"")  # type: ignore[no-any-return]


def known_stacks() -> Stacks:
    """Return the stacks that were run."""
    return cast(Stacks, _table()["run"])


def oldest_releases() -> Mapping[str, str]:
    """Return the oldest release of each package beside which the plugin changes anything."""
    return cast(Mapping[str, str], _table()["oldest"])


def nearest_stack(libraries: Libraries = IMPORTED) -> Nearest | None:
    """Find the stack that shares most releases with the installed one; None without torch or with an odd version."""
    here = {name: version for name in WEIGHTS if (version := gate.installed_version(name, libraries))}
    if "torch" not in here or not all(requirement.parse_version(version) for version in here.values()):
        return None
    name, stack = min(known_stacks().items(), key=lambda each: _distance(here, each[1]))
    pairs = {
        package: (version.partition("+")[0], _closest(version, stack[package]))
        for package, version in here.items()
        if package in stack
    }
    return Nearest(name, {package: pair for package, pair in pairs.items() if Version(pair[0]) != Version(pair[1])})


def report_notes(libraries: Libraries = IMPORTED) -> tuple[str, ...]:
    """Say in the report which stack is nearest, or which packages are too old."""
    if old := gate.too_old(oldest_releases(), libraries):
        return (f"{old}; nothing is changed",)
    found = nearest_stack(libraries)
    return () if found is None else (str(found),)


def _closest(version: str, releases: list[str]) -> str:
    return min(releases, key=lambda release: _apart(version, release))


def _distance(here: Mapping[str, str], stack: Mapping[str, list[str]]) -> float:
    return sum(
        WEIGHTS[name] * _apart(version, _closest(version, stack[name]))
        for name, version in here.items()
        if name in stack
    )


def _apart(one: str, other: str) -> float:
    """Return 0 for one release, 0.5 for two of one series, and more for each series between them."""
    a, b = Version(one), Version(other)
    if a.public == b.public:
        return 0
    if a.release[:2] == b.release[:2]:
        return 0.5
    minors = a.minor - b.minor if a.major == b.major else 10 * (a.major - b.major)
    return 1 + abs(minors) / 5
