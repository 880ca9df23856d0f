"""What patches rest on in releases, and the digests of that: read once, for any choice of releases."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from patches import REGISTRY
from patches.engine import definitions, gate, requirement
from patches.engine.patch import Part

from .names import Names
from .rests_on import rests_on
from .wheel_files import WheelFiles


def parts() -> list[Part]:
    """Return every part of every patch."""
    return [part for patch in REGISTRY.patches.values() for part in patch.parts]


def is_for(part: Part, release: str) -> bool:
    """Tell whether ``part`` is for a release of the package that it repairs."""
    needed = [requirement.parse(text) for text in part.requires]
    return all(each.contains(release) for each in needed if each.name == part.package)


def edited(part: Part) -> set[str]:
    """Return the targets of a part's edits in its own package."""
    own = gate.module_name(part.package)
    return {edit.target for edit in part.edits if edit.target.partition(":")[0].partition(".")[0] == own}


class Gathered:
    """Names and digests of releases, from their wheels."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], Names] = {}
        self._rests: dict[tuple[str, str], set[str]] = {}
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

    def rests_on(self, part: Part, releases: Sequence[str]) -> set[str]:
        """Return what ``part`` rests on in those of ``releases`` that it is for."""
        found: set[str] = set()
        for release in releases:
            if is_for(part, release):
                key = (part.key, release)
                if key not in self._rests:
                    self._rests[key] = rests_on(part, self.names(part.package, release))
                found |= self._rests[key]
        return found

    def table(self, releases: Mapping[str, Sequence[str]], failed: Mapping[str, Collection[str]]) -> dict[str, Any]:
        """Return the table for these releases of each package, as :mod:`patches.newer_releases.source_table` reads it.

        ``failed`` names for parts, by key, the releases on which their reproducers failed.
        """
        chosen = [part for part in parts() if part.package in releases]
        rests = {part.key: self.rests_on(part, releases[part.package]) for part in chosen}
        digests: dict[str, dict[str, dict[str, str]]] = {}
        for part in chosen:
            package = part.package
            for name in rests[part.key] | edited(part):
                of_name = digests.setdefault(package, {}).setdefault(name, {})
                for release in releases[package] if not of_name else ():
                    digest = self.digest(package, release, name)
                    if digest != definitions.ABSENT:
                        of_name[digest] = f"{of_name.get(digest, '')} {release}".strip()
        return {
            "releases": {package: " ".join(each) for package, each in releases.items()},
            "failed": {
                part.key: " ".join(release for release in releases[part.package] if release in failed[part.key])
                for part in chosen
                if failed.get(part.key)
            },
            "rests_on": {part.key: sorted(rests[part.key] - edited(part)) for part in chosen},
            "digests": digests,
        }
