"""Comparing the installed source of what a patch rests on with that of the releases that were tested.

A patch rests on the functions that its edits name, and on what our own code takes or reads of the library by name.
``sources.json`` lists the latter for each patch, and has the digest of all in every release that was tested.
``make sources`` writes it.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from ..engine import gate, requirement
from ..engine.definitions import ABSENT
from ..engine.edits import Edit, Rewrite
from ..engine.patch import Part

Digests = Callable[[str, Sequence[str]], Mapping[str, str]]
"""From the path of a source file and names in it to their digests; see :mod:`patches.engine.definitions`."""
_NO_SOURCE = "no source"
NOT_COMPARED = "its source cannot be compared"
_WITHOUT_SOURCE = tuple({*importlib.machinery.all_suffixes()} - {".py"})


class Comparison(NamedTuple):
    """The tested release that is nearest to what is installed, and what differs from it."""

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
    """The table that the package ships, and the installed files beside it; each file is read once."""

    def __init__(self, digests: Digests, load: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._digests = digests
        self._load = load or _shipped
        self._found: dict[tuple[str, str], Mapping[str, str]] = {}

    @functools.cached_property
    def _table(self) -> Mapping[str, Any]:
        return self._load()

    def compare(self, part: Part, version: str) -> Comparison:
        """Compare the package that ``part`` repairs, of which ``version`` is installed, with the tested releases."""
        if requirement.parse_version(version) is None:
            return Comparison("", why="no tested release can be compared")
        here = self.installed(part, version)
        if _NO_SOURCE in here.values():
            return Comparison("", why=NOT_COMPARED)
        if not set(here.values()) - {ABSENT}:  # to be absent as in a tested release says nothing
            return Comparison("", why="nothing that the patch rests on is in its source")
        best = Comparison("", why="the patch has other edits for each release that was tested")
        for release in self._releases(part, version):
            different = tuple(n for n, digest in here.items() if self._in_release(part.package, n, release) != digest)
            if not best.release or len(different) < len(best.different):
                best = Comparison(release, different)
            if not different:
                break
        return best

    def installed(self, part: Part, version: str) -> dict[str, str]:
        """Return the installed digest of each definition that ``part`` rests on."""
        return {name: self._here(part.package, name) for name in self._names(part, version)}

    def fingerprint(self, part: Part, version: str) -> str:
        """Return one digest of all that ``part`` rests on here and of its edits; empty where there is no source."""
        found = self.installed(part, version)
        if _NO_SOURCE in found.values():
            return ""
        text = json.dumps([sorted(found.items()), [_words(edit) for edit in part.edits]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _names(self, part: Part, version: str) -> list[str]:
        """Return the definitions of its package that ``part`` rests on."""
        edited = [edit.target for edit, is_for in zip(part.edits, _chosen(part, version)) if is_for]
        own = gate.module_name(part.package)
        named = dict.fromkeys((*edited, *self._table["rests_on"].get(part.key, ())))
        return [name for name in named if name.partition(":")[0].partition(".")[0] == own]

    def _releases(self, part: Part, version: str) -> list[str]:
        """Return the tested releases that ``part`` is for and has the same edits for, the newest first."""
        package, edits = part.package, _chosen(part, version)
        return [
            release
            for release in sorted(self._table["releases"].get(package, "").split(), key=Version, reverse=True)
            if _fits(part.requires, package, release) and _chosen(part, release) == edits
        ]

    def _in_release(self, package: str, name: str, release: str) -> str:
        digests: Mapping[str, str] = self._table["digests"][package].get(name, {})
        return next((digest for digest, releases in digests.items() if release in releases.split()), ABSENT)

    def _here(self, package: str, name: str) -> str:
        module, _, path = name.partition(":")
        key = (package, module)
        if key not in self._found:
            known = self._table["digests"].get(package, ())
            wanted = sorted(each.partition(":")[2] for each in known if each.partition(":")[0] == module)
            self._found[key] = self._read(module, wanted)
        return self._found[key].get(path, _NO_SOURCE)

    def _read(self, module: str, names: Sequence[str]) -> Mapping[str, str]:
        try:
            file = source_file(module)
            return dict.fromkeys(names, ABSENT) if file is None else self._digests(str(file), names)
        except (OSError, ValueError, SyntaxError, ImportError, RecursionError, MemoryError):
            return {}


def _shipped() -> Mapping[str, Any]:
    return json.loads(pkgutil.get_data(__name__, "sources.json") or b"")  # type: ignore[no-any-return]


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


def _chosen(part: Part, version: str) -> tuple[bool, ...]:
    """Tell for each edit whether it is for ``version`` of the package, whatever it asks of others."""
    return tuple(_fits(edit.when.split(" and ") if edit.when else (), part.package, version) for edit in part.edits)


def _fits(requirements: Iterable[str], package: str, version: str) -> bool:
    return all(needed.contains(version) for needed in map(requirement.parse, requirements) if needed.name == package)


def _words(edit: Edit) -> list[str]:
    """Return what an edit says in words: a changed edit is another one."""
    return [edit.target, edit.when, *((edit.find, edit.replace, str(edit.count)) if isinstance(edit, Rewrite) else ())]
