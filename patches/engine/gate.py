"""Whether a patch is for the installed releases, and if not, why. Changes nothing, imports nothing."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from packaging.version import Version

from . import requirement
from .libraries import IMPORTED, Libraries
from .patch import Part, Patch
from .report import Status


class Verdict(NamedTuple):
    """``status`` is AVAILABLE, NOT_INSTALLED, NOT_AFFECTED or UNTESTED."""

    status: Status
    reason: str
    versions: Mapping[str, str | None]


def installed_version(package: str, libraries: Libraries = IMPORTED) -> str | None:
    """Return the version of a distribution as its imported module gives it, before the import as its metadata do."""
    return libraries.version(module_name(package)) or _metadata_version(package)


def recorded_version(package: str) -> str | None:
    """Return the version of a distribution as its metadata give it, whatever is imported; without any as its module does."""
    return _metadata_version(package) or IMPORTED.version(module_name(package))


def mismatch(package: str, libraries: Libraries = IMPORTED) -> str:
    """Return a sentence if the imported module is of another version than its metadata say; else an empty string."""
    here, said = libraries.version(module_name(package)), _metadata_version(package)
    if not here or not said or here == said or _public(here) == _public(said):
        return ""
    return (
        f"{package}: the imported module is version {here}, its metadata says {said}; the version of the module is used"
    )


def module_name(package: str) -> str:
    """Return the top-level module of a distribution that is repaired here."""
    return package.replace("-", "_")


def _public(version: str) -> str:
    return version.partition("+")[0]


def _metadata_version(package: str) -> str | None:
    try:
        return _read_version(package)
    except importlib.metadata.PackageNotFoundError:  # not remembered: it may be installed yet
        return None


@functools.lru_cache
def _read_version(package: str) -> str:
    found = importlib.metadata.distribution(package)
    # Only this line of the headers: to parse the whole file, README included, takes milliseconds.
    line = re.search(r"^Version:[ \t]*(\S+)[ \t]*$", found.read_text("METADATA") or "", re.MULTILINE)
    return line[1] if line else found.version


def packages(patch: Patch | Part) -> list[str]:
    """Return the distributions that ``patch`` requires."""
    return list(dict.fromkeys(requirement.parse(text).name for part in patch.parts for text in part.requires))


def too_old(oldest_supported: Mapping[str, str], libraries: Libraries = IMPORTED) -> str:
    """Name the installed packages that are older than their release in ``oldest_supported``; empty if there are none."""
    old = []
    for package, oldest in oldest_supported.items():
        version = installed_version(package, libraries)
        if version is not None and _is_older(package, version, oldest):
            old.append(f"{package} {version} is too old: {oldest} or later is needed")
    return "; ".join(old)


def satisfied(requirements: str, libraries: Libraries = IMPORTED) -> bool:
    """Tell whether the installed releases meet requirements joined by " and "; absent packages meet none."""
    for text in requirements.split(" and "):
        version = installed_version(requirement.parse(text).name, libraries)
        if version is None or not contains(text, version):
            return False
    return True


OnNewer = Callable[[Part, str, str], tuple[bool, str]]
"""From a part, a package and a version of it that was not tested: whether it is applied all the same, and why.

Without a reason if there is nothing to say: it edits nothing of the package.
"""


def left_out(part: Part, package: str, version: str) -> tuple[bool, str]:
    """Apply nothing on a version that it was not tested on."""
    return False, "to try it: patches.apply(untested=True) or PATCHES_UNTESTED=1"


class Limits(NamedTuple):
    """How old and how new a release may be, whatever a patch requires."""

    oldest_supported: Mapping[str, str] = MappingProxyType({})
    """The oldest release of each package with which any patch is applied."""
    newest_tested: Mapping[str, str] = MappingProxyType({})
    """The newest release of each package that any patch was tested on."""
    on_newer: OnNewer = left_out
    """Asked about each package that is newer than any release that was tested."""


NO_LIMITS = Limits()


def check(
    part: Part, limits: Limits = NO_LIMITS, *, untested: bool = False, libraries: Libraries = IMPORTED
) -> Verdict:
    """Say whether ``part`` is for the installed releases.

    ``untested`` lets a release pass that is newer than any that the part was tested on: the exact match of the source
    still decides.
    """
    versions = {name: installed_version(name, libraries) for name in packages(part)}
    for name, found in versions.items():
        if found is None:
            return Verdict(Status.NOT_INSTALLED, f"{name} is not installed", versions)
    if old := too_old(limits.oldest_supported, libraries):
        return Verdict(Status.NOT_AFFECTED, old, versions)
    for text in part.requires:
        needed = requirement.parse(text)
        version = str(versions[needed.name])
        if not contains(text, version):
            reason = f"{needed.name} {version} is outside {needed.specifier}"
            return Verdict(Status.NOT_AFFECTED, reason, versions)
    if untested:
        return Verdict(Status.AVAILABLE, "", versions)
    if odd := {name: str(v) for name, v in versions.items() if requirement.parse_version(str(v)) is None}:
        applied, why = limits.on_newer(part, part.package, next(iter(odd.values())))
        said = f"the version of {' and of '.join(map(' '.join, odd.items()))} cannot be read; {why}"
        return Verdict(Status.AVAILABLE if applied else Status.UNTESTED, said, versions)
    reasons = []
    for package, version, tested in newer_packages(part, limits, libraries):
        applied, why = limits.on_newer(part, package, version)
        said = f"{package} {version} is newer than {tested}; {why}"
        if not applied:
            return Verdict(Status.UNTESTED, said, versions)
        reasons += [said] if why else []
    return Verdict(Status.AVAILABLE, "; ".join(reasons), versions)


def newer_packages(part: Part, limits: Limits, libraries: Libraries = IMPORTED) -> Iterator[tuple[str, str, str]]:
    """Give each package that ``part`` edits in a release that is newer than any that was tested.

    Each comes with the installed release and the newest that was tested: of the package that the part repairs by the
    part itself, of another by any patch.
    """
    for package in (part.package, *part.neighbours):
        version = installed_version(package, libraries)
        tested = part.tested_up_to if package == part.package else limits.newest_tested.get(package, "")
        if version is not None and tested and _newer(version, tested):
            yield package, version, tested


def newest_tested(patches: Iterable[Patch]) -> dict[str, str]:
    """Return the newest release of each package that one of ``patches`` was tested on."""
    newest: dict[str, str] = {}
    for part in (part for patch in patches for part in patch.parts):
        known = newest.get(part.package)
        if part.tested_up_to and (known is None or _newer(part.tested_up_to, known)):
            newest[part.package] = part.tested_up_to
    return newest


@functools.cache
def _is_older(package: str, version: str, oldest: str) -> bool:
    """Tell whether ``version`` is older; a version that cannot be read does not count as older."""
    return requirement.parse_version(version) is not None and not contains(f"{package}>={oldest}", version)


@functools.cache
def contains(needed: str, version: str) -> bool:
    """Tell whether a requirement is met by a version of its package, see :meth:`.requirement.Requirement.contains`."""
    return requirement.parse(needed).contains(version)


@functools.cache
def _newer(version: str, tested: str) -> bool:
    """Tell whether ``version`` is newer; a version that cannot be read does not count as newer."""
    found = requirement.parse_version(version)
    return found is not None and found.release > Version(tested).release
