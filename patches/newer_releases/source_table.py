"""Comparing the installed source that a patch rests on with the source in the releases that were tested.

A patch rests on the functions that its edits name, and on what our own code takes or reads of the library by name.
``sources.json`` lists the latter for each patch, and has the digest of all in every release that was tested; a release on
which the reproducer of a patch failed does not count for it. ``make sources`` writes the file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from ..engine import gate, requirement
from ..engine.definitions import ABSENT
from ..engine.edits import Edit, Rewrite
from ..engine.patch import Part

Digests = Callable[[str, Sequence[str]], Mapping[str, str]]
"""From a module and names in it to their digests (:mod:`patches.engine.definitions`); raises what reading it raises."""
_NO_SOURCE = "no source"
NOT_COMPARED = "its source cannot be compared"
_WITHOUT_SOURCE = tuple({*importlib.machinery.all_suffixes()} - {".py"})


class Comparison(NamedTuple):
    """The tested release that is nearest to the installed one, and what differs from it."""

    release: str
    """Empty if nothing can be compared."""
    different: tuple[str, ...] = ()
    """As ``"module:name"``."""
    why: str = ""
    """Why nothing can be compared."""

    @property
    def is_known(self) -> bool:
        return bool(self.release) and not self.different


class SourceTable:
    """The table that the package ships, and ``digests`` of the installed packages; each module is read once."""

    def __init__(self, digests: Digests, load: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._digests = digests
        self._load = load or _shipped
        self._found: dict[tuple[str, str], Mapping[str, str]] = {}
        self._named: dict[str, dict[str, list[str]]] = {}
        self._sorted: dict[str, list[str]] = {}
        self._of_releases: dict[tuple[str, str], Mapping[str, str]] = {}

    @functools.cached_property
    def _table(self) -> Mapping[str, Any]:
        return self._load()

    def compare(self, part: Part, version: str, package: str = "") -> Comparison:
        """Compare ``package``, by default the one that ``part`` repairs, with the tested releases.

        ``version`` of it is installed.
        """
        package = package or part.package
        if requirement.parse_version(version) is None:
            return Comparison("", why="no tested release can be compared")
        here = self.installed(part, package, version)
        if _NO_SOURCE in here.values():
            return Comparison("", why=NOT_COMPARED)
        if not set(here.values()) - {ABSENT}:  # to be absent as in a tested release says nothing
            return Comparison("", why="nothing that the patch rests on is in its source")
        best = Comparison("", why="the patch has other edits for each release that was tested")
        for release in self._releases(part, package, version):
            different = tuple(n for n, digest in here.items() if self._in_release(package, n, release) != digest)
            if not best.release or len(different) < len(best.different):
                best = Comparison(release, different)
            if not different:
                break
        return best

    def installed(self, part: Part, package: str, version: str) -> dict[str, str]:
        """Return the installed digest of each definition of ``package`` that ``part`` rests on."""
        return {name: self._here(package, name) for name in self._names(part, package, version)}

    def edits_any(self, part: Part, package: str, version: str) -> bool:
        """Tell whether ``part`` has an edit in ``package`` for ``version`` of it."""
        return any(is_in(package, target) for target in _targets(part, package, version))

    def fingerprint(self, part: Part, versions: Mapping[str, str]) -> str:
        """Return one digest of all that ``part`` rests on here and of its edits; empty where there is no source.

        ``versions`` has the installed releases of the packages that it edits.
        """
        found: dict[str, str] = {}
        for package, version in versions.items():
            found |= self.installed(part, package, version)
        if _NO_SOURCE in found.values():
            return ""
        text = json.dumps([sorted(found.items()), [_words(edit) for edit in part.edits]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _names(self, part: Part, package: str, version: str) -> list[str]:
        """Return the definitions of ``package`` that ``part`` rests on."""
        named = dict.fromkeys((*_targets(part, package, version), *self._table["rests_on"].get(part.key, ())))
        return [name for name in named if is_in(package, name)]

    def _releases(self, part: Part, package: str, version: str) -> Iterator[str]:
        """Give the releases that ``part`` was tested on and has the same edits for, the newest first.

        The table has newer ones too, which only other patches were tested on.
        """
        failed = self._table["failed"].get(part.key, "").split()
        edits, tested = _chosen(part, package, version), self._tested(package)
        if package == part.package:
            newest = Version(part.tested_up_to)
            tested = [release for release in tested if release not in failed and Version(release) <= newest]
        for release in tested:
            if fits(part.requires, package, release) and _chosen(part, package, release) == edits:
                yield release

    def _tested(self, package: str) -> list[str]:
        """Return the tested releases of ``package``, the newest first."""
        if package not in self._sorted:
            tested = self._table["releases"].get(package, "").split()
            self._sorted[package] = sorted(tested, key=Version, reverse=True)
        return self._sorted[package]

    def _in_release(self, package: str, name: str, release: str) -> str:
        key = (package, name)
        if key not in self._of_releases:
            digests = self._table["digests"].get(package, {}).get(name, {})
            self._of_releases[key] = {each: digest for digest, those in digests.items() for each in those.split()}
        return self._of_releases[key].get(release, ABSENT)

    def _here(self, package: str, name: str) -> str:
        module, _, path = name.partition(":")
        key = (package, module)
        if key not in self._found:
            self._found[key] = self._read(module, self._modules(package).get(module, ()))
        return self._found[key].get(path, _NO_SOURCE)

    def _modules(self, package: str) -> Mapping[str, list[str]]:
        """Return what the table has of ``package``, by module."""
        if package not in self._named:
            found: dict[str, list[str]] = {}
            for name in sorted(self._table["digests"].get(package, ())):
                module, _, path = name.partition(":")
                found.setdefault(module, []).append(path)
            self._named[package] = found  # whole, for other threads
        return self._named[package]

    def _read(self, module: str, names: Sequence[str]) -> Mapping[str, str]:
        try:
            return self._digests(module, names)
        except (OSError, ValueError, SyntaxError, ImportError, RecursionError, MemoryError):  # the last two: too deep
            return {}


def _shipped() -> Mapping[str, Any]:
    return json.loads(pkgutil.get_data(__name__, "sources.json") or b"")  # type: ignore[no-any-return]


def of_installed(read: Callable[[str, Sequence[str]], Mapping[str, str]]) -> Digests:
    """Return the digests of the installed packages; ``read`` gives the digests of a file."""

    def digests(module: str, names: Sequence[str]) -> Mapping[str, str]:
        file = source_file(module)
        return dict.fromkeys(names, ABSENT) if file is None else read(str(file), names)

    return digests


def source_file(module: str) -> Path | None:
    """Return the source file of a module, which need not be imported; None if its package has no such module.

    Raises
    ------
    ValueError
        The package lies in no folder: it comes from a zip file. Or the module is there without its source.
    ImportError
        There is no such package.
    """
    package, *rest = module.split(".")
    folders = _folders(package)
    if not any(map(os.path.isdir, folders)):
        raise ValueError(f"{package} does not lie in a folder")
    for folder in folders:
        path = os.path.join(folder, *rest)
        for stem in (os.path.join(path, "__init__"), *([path] if rest else ())):
            if os.path.isfile(f"{stem}.py"):
                return Path(f"{stem}.py")
            if any(os.path.isfile(f"{stem}{suffix}") for suffix in _WITHOUT_SOURCE):
                raise ValueError(f"{module} is there without its source")
    return None


def _folders(package: str) -> list[str]:
    if package in sys.modules:
        return list(getattr(sys.modules[package], "__path__", ()))
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"there is no {package}")
    return list(spec.submodule_search_locations or ())


def is_in(package: str, name: str) -> bool:
    """Tell whether ``"module:name"`` is in ``package``."""
    return name.partition(":")[0].partition(".")[0] == gate.module_name(package)


def _targets(part: Part, package: str, version: str) -> list[str]:
    """Return the targets of the edits that are for ``version`` of ``package``."""
    return [edit.target for edit, is_for in zip(part.edits, _chosen(part, package, version)) if is_for]


def _chosen(part: Part, package: str, version: str) -> tuple[bool, ...]:
    """Tell for each edit whether it is for ``version`` of ``package``, whatever it asks of others."""
    return tuple(fits(edit.when.split(" and ") if edit.when else (), package, version) for edit in part.edits)


def fits(requirements: Iterable[str], package: str, version: str) -> bool:
    """Tell whether ``version`` of ``package`` meets those of ``requirements`` that are about it."""
    return all(gate.contains(text, version) for text in requirements if requirement.parse(text).name == package)


def _words(edit: Edit) -> list[str]:
    """Return what an edit says in words: a changed edit is another one."""
    return [edit.target, edit.when, *((edit.find, edit.replace, str(edit.count)) if isinstance(edit, Rewrite) else ())]
