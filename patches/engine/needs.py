"""What a patch needs here: which of its edits are for the installed releases, and which modules must be imported."""

from __future__ import annotations

import importlib

from . import gate
from .edits import Edit, module_of
from .imports import imported
from .patch import Part, Patch


def edits(patch: Patch | Part) -> list[Edit]:
    """The edits of ``patch`` for the installed releases; of several parts, of the parts that fit these releases."""
    parts = (
        patch.parts if len(patch.parts) == 1 else [p for p in patch.parts if gate.satisfied(" and ".join(p.requires))]
    )
    return [edit for part in parts for edit in part.edits if not edit.when or gate.satisfied(edit.when)]


def modules(patch: Patch | Part) -> set[str]:
    """What ``patch`` edits, and the packages that it repairs: an edit may be in torch, and the defect is not."""
    return {*(gate.module_name(part.package) for part in patch.parts), *map(module_of, edits(patch))}


def import_targets(*patches: Patch | Part) -> list[str]:
    """Import what ``patches`` edit here; what cannot be imported stays missing. Says which did not fit, and why.

    That a package or module is absent is not said: the report says so. Any other error is: a package that was built
    for another torch raises any error. Such a package is tried once.
    """
    said: dict[str, str | None] = {}
    for name in sorted({name for patch in patches for name in modules(patch)}):
        package = name.partition(".")[0]
        if package not in said:
            said[package] = _failure(package)
        if said[package] is None and name not in said:
            said[name] = _failure(name)
    return [f"{name} cannot be imported: {why}" for name, why in said.items() if why]


def _failure(name: str) -> str | None:
    """Why module ``name`` cannot be imported; empty if the report says it, None if it is imported now."""
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        return "" if error.name is not None and name.startswith(error.name) else _brief(error)
    except BaseException as error:  # SystemExit too: it is the package's, not ours
        return "" if isinstance(error, NotImplementedError) else _brief(error)  # unsloth without a GPU
    return None


def _brief(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def missing(patch: Part) -> set[str]:
    """Modules that ``patch`` edits, or whose package it repairs, and that are not imported whole."""
    return {name for name in modules(patch) if not imported(name)}


def packages(patch: Patch | Part) -> set[str]:
    """Top-level modules on which it depends whether ``patch`` goes in."""
    edited = (module_of(edit).partition(".")[0] for part in patch.parts for edit in part.edits)
    return {*map(gate.module_name, gate.packages(patch)), *edited}


def is_to_come(patch: Part) -> bool:
    """Whether the package that ``patch`` repairs is not imported yet: nothing else about it matters until then."""
    return not imported(gate.module_name(patch.package))


def awaited(patch: Part) -> set[str]:
    """Modules whose import can still change what becomes of ``patch``."""
    if is_to_come(patch):
        return {gate.module_name(patch.package)}
    unseen = {name for name in map(gate.module_name, gate.packages(patch)) if not imported(name)}
    return unseen | missing(patch)
