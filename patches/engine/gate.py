"""Whether a patch is for the installed releases, and if not, why. Changes nothing, imports nothing."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar
from weakref import ref

from packaging.version import InvalidVersion, Version

from . import imports, requirement
from .patch import Part, Patch
from .report import Status

T = TypeVar("T")


class Verdict(NamedTuple):
    """``status`` is AVAILABLE, NOT_INSTALLED, NOT_AFFECTED or UNTESTED."""

    status: Status
    reason: str
    versions: Mapping[str, str | None]


class _Look(dict[str, str | None]):
    """Versions by package, for the time of one :func:`in_one_look`; unlike a dict it can be referred to weakly."""


class _Looked(threading.local):
    look: ref[_Look] | None = None
    """What was found since :func:`in_one_look` began in this thread; None or dead outside of it."""


_looked = _Looked()


def in_one_look(call: Callable[[], T]) -> T:
    """What ``call`` returns; meanwhile the version of a package is looked up once. One inside another looks anew."""
    # No context manager: an error between its beginning and ours would leave its memory behind.
    outer = _looked.look
    look = _Look()  # gone with this frame, also where an interrupt comes before the last line
    try:
        _looked.look = ref(look)
        return call()
    finally:
        _looked.look = outer


def remembered() -> dict[str, str | None] | None:
    """The versions that were looked up in this thread and hold now; None outside of :func:`in_one_look`."""
    return None if _looked.look is None else _looked.look()


def installed(package: str) -> str | None:
    """The version of a distribution: what its imported module says, before the import what its metadata say."""
    known = remembered()
    if known is None:
        return _imported_version(package) or _metadata_version(package)
    if package not in known:
        known[package] = _imported_version(package) or _metadata_version(package)
    return known[package]


def mismatch(package: str) -> str:
    """In words, if the module that is imported is of another version than the metadata beside it; else empty."""
    here, said = _imported_version(package), _metadata_version(package)
    if not here or not said or here == said or _public(here) == _public(said):
        return ""
    return (
        f"{package}: the imported module is version {here}, its metadata says {said}; the version of the module is used"
    )


def module_name(package: str) -> str:
    """The top-level module of a distribution, for the packages that are repaired here."""
    return package.replace("-", "_")


def _imported_version(package: str) -> str | None:
    name = module_name(package)
    if not imports.imported(name):
        return None  # a module that is half way through its import may not have said it yet
    try:
        found = sys.modules[name].__version__
    except Exception:  # a lazy module may do anything
        return None
    return found if isinstance(found, str) else None


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
    """The distributions that ``patch`` requires."""
    return list(dict.fromkeys(requirement.parse(text).name for part in patch.parts for text in part.requires))


floors: dict[str, str] = {}
"""The oldest release of each package that anything is changed beside, whatever a patch requires; who has a table of
stacks that were run fills it."""


def too_old() -> str:
    """In words, which installed packages are older than any that was run, and the release that is needed; else empty."""
    old = []
    for package, oldest in floors.items():
        version = installed(package)
        if version is not None and _is_older(package, version, oldest):
            old.append(f"{package} {version} is too old: {oldest} or later is needed")
    return "; ".join(old)


def satisfied(requirements: str) -> bool:
    """Whether the installed releases meet requirements joined by " and "; absent packages meet none."""
    for text in requirements.split(" and "):
        version = installed(requirement.parse(text).name)
        if version is None or not _contains(text, version):
            return False
    return True


_TO_TRY = "to try it: patches.apply(untested=True) or PATCHES_UNTESTED=1"


def check(patch: Patch | Part, *, untested: bool = False) -> Verdict:
    """Say whether ``patch`` is for the installed releases: of several parts, whether one is.

    With ``untested``, a release newer than any that the patch was tested on is no obstacle: the
    exact match of the source still decides.
    """
    verdicts = [_check(part, untested) for part in patch.parts]
    return next((each for each in verdicts if each.status is Status.AVAILABLE), verdicts[0])


def _check(patch: Part, untested: bool) -> Verdict:
    versions = {name: installed(name) for name in packages(patch)}
    for name, found in versions.items():
        if found is None:
            return Verdict(Status.NOT_INSTALLED, f"{name} is not installed", versions)
    if old := too_old():
        return Verdict(Status.NOT_AFFECTED, old, versions)
    if not untested and (odd := [f"{n} {v}" for n, v in versions.items() if requirement.read(str(v)) is None]):
        why = f"the version of {' and of '.join(odd)} cannot be read; {_TO_TRY}"
        return Verdict(Status.UNTESTED, why, versions)
    for text in patch.requires:
        needed = requirement.parse(text)
        version = str(versions[needed.name])
        if not _contains(text, version):
            reason = f"{needed.name} {version} is outside {needed.specifier}"
            return Verdict(Status.NOT_AFFECTED, reason, versions)
    package, version = patch.package, str(versions[patch.package])
    if not untested and _newer(version, patch.tested_up_to):
        return Verdict(
            Status.UNTESTED,
            f"{package} {version} is newer than {patch.tested_up_to}, the last it was tested on; {_TO_TRY}",
            versions,
        )
    return Verdict(Status.AVAILABLE, "", versions)


@functools.cache
def _is_older(package: str, version: str, oldest: str) -> bool:
    """Whether it is known to be: a version that cannot be read is not."""
    return requirement.read(version) is not None and not _contains(f"{package}>={oldest}", version)


@functools.cache
def _contains(needed: str, version: str) -> bool:
    return requirement.parse(needed).contains(version)


@functools.cache
def _newer(version: str, tested: str) -> bool:
    try:
        return Version(version).release > Version(tested).release
    except InvalidVersion:
        return True
