"""What patches rest on in releases, and the digests of that: read once, for any choice of releases."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from packaging.version import Version

from patches import REGISTRY
from patches.engine import definitions
from patches.engine.patch import Part
from patches.newer_releases.source_table import fits, is_in

from .names import Names
from .rests_on import rests_on
from .wheel_files import WheelFiles


def parts() -> list[Part]:
    """Return every part of every patch."""
    return [part for patch in REGISTRY.patches.values() for part in patch.parts]


def is_for(part: Part, release: str, package: str = "") -> bool:
    """Tell whether ``part`` is for a release of a package, by default of the one that it repairs."""
    return fits(part.requires, package or part.package, release)


def edited(part: Part, package: str = "") -> set[str]:
    """Return the targets of a part's edits in a package, by default in the one that it repairs."""
    return {edit.target for edit in part.edits if is_in(package or part.package, edit.target)}


class Gathered:
    """Names and digests of releases, from their wheels."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], Names] = {}
        self._rests: dict[tuple[str, str, str], set[str]] = {}
        self._digests: dict[tuple[str, str, str], str] = {}

    def names(self, package: str, release: str) -> Names:
        """Return the names of a release."""
        key = (package, release)
        if key not in self._names:
            self._names[key] = Names(WheelFiles(package, release).text)
        return self._names[key]

    def digest(self, package: str, release: str, name: str) -> str:
        """Return the digest of ``"module:name"`` in a release."""
        key = (package, release, name)
        if key not in self._digests:
            module, _, path = name.partition(":")
            self._digests[key] = definitions.digest(self.names(package, release).tree(module), path)
        return self._digests[key]

    def rests_on(self, part: Part, package: str, releases: Sequence[str]) -> set[str]:
        """Return what ``part`` rests on in those of ``releases`` of ``package`` that it is for."""
        found: set[str] = set()
        for release in releases:
            if is_for(part, release, package):
                key = (part.key, package, release)
                if key not in self._rests:
                    self._rests[key] = rests_on(part, self.names(package, release), package)
                found |= self._rests[key]
        return found

    def table(self, releases: Mapping[str, Sequence[str]], failed: Mapping[str, Collection[str]]) -> dict[str, Any]:
        """Return the table for these releases of each package, as :mod:`patches.newer_releases.source_table` reads it.

        ``failed`` names for parts, by key, the releases on which their reproducers failed.
        """
        rests: dict[str, set[str]] = {}
        digests: dict[str, dict[str, dict[str, str]]] = {}
        for part in parts():
            for package in releases.keys() & {part.package, *part.neighbours}:
                named, targets = self.rests_on(part, package, releases[package]), edited(part, package)
                rests.setdefault(part.key, set()).update(named - targets)
                for name in named | targets:
                    self._add(digests.setdefault(package, {}), package, name, releases[package])
        return {
            "releases": {package: " ".join(each) for package, each in releases.items()},
            "failed": {key: " ".join(sorted(each, key=Version)) for key, each in failed.items() if key in rests},
            "rests_on": {key: sorted(each) for key, each in rests.items()},
            "digests": digests,
        }

    def _add(self, digests: dict[str, dict[str, str]], package: str, name: str, releases: Sequence[str]) -> None:
        """Add the digests of a definition, each with the releases that have it."""
        if name in digests:
            return
        digests[name] = {}
        for release in releases:
            if (digest := self.digest(package, release, name)) != definitions.ABSENT:
                digests[name][digest] = f"{digests[name].get(digest, '')} {release}".strip()
