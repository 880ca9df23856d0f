"""The whole stacks that the plugin was run on: which of them is nearest to the installed one, and which packages are too old.

``table.json`` is made from ``tests/stacks/stacks.toml`` and from what ``make stacks`` has found.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from packaging.version import Version

from ..engine import gate, requirement

Stacks = Mapping[str, Mapping[str, list[str]]]
"""For each name the releases of each package; more than one of torch where the stack was run with more."""
WEIGHTS = {"torch": 3.0, "transformers": 3.0, "peft": 2.0, "bitsandbytes": 2.0, "accelerate": 1.0, "trl": 0.5}
"""How much it counts that a package is of another release."""


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
    """The stacks that were run."""
    run: Stacks = _table()["run"]
    return run


def oldest_releases() -> Mapping[str, str]:
    """The oldest release of each package that the plugin needs, where it is installed."""
    oldest: Mapping[str, str] = _table()["oldest"]
    return oldest


def nearest_stack() -> Nearest | None:
    """The stack of the table that shares most releases with the installed one; None without torch, or if a version cannot be read."""
    here = {name: version for name in WEIGHTS if (version := gate.installed(name))}
    if "torch" not in here or not all(requirement.read(version) for version in here.values()):
        return None
    name = min(known_stacks(), key=lambda name: _distance(here, known_stacks()[name]))
    stack = known_stacks()[name]
    pairs = {package: (_public(here[package]), _closest(here[package], stack[package])) for package in here
             if package in stack}  # fmt: skip
    return Nearest(name, {package: pair for package, pair in pairs.items() if Version(pair[0]) != Version(pair[1])})


def report_notes() -> tuple[str, ...]:
    """What the report says of the installed stack."""
    if old := gate.too_old(oldest_releases()):
        return (f"{old}; nothing is changed",)
    found = nearest_stack()
    return () if found is None else (str(found),)


def _public(version: str) -> str:
    return version.partition("+")[0]


def _closest(version: str, releases: list[str]) -> str:
    return min(releases, key=lambda release: _apart(version, release))


def _distance(here: Mapping[str, str], stack: Mapping[str, list[str]]) -> float:
    return sum(
        WEIGHTS[name] * min(_apart(version, release) for release in stack[name])
        for name, version in here.items()
        if name in stack
    )


def _apart(one: str, other: str) -> float:
    """0 for one release, up to 1 for two of one series, and more for each series between them."""
    a, b = Version(one), Version(other)
    if a.public == b.public:
        return 0
    if a.release[:2] == b.release[:2]:
        return 0.5
    minors = a.minor - b.minor if a.major == b.major else 10 * (a.major - b.major)
    return 1 + abs(minors) / 5
