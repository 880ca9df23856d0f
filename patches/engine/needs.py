"""What a patch needs here: which of its edits are for the installed releases, and which modules must be imported."""

from __future__ import annotations

import contextlib
import importlib

from . import gate
from .edits import Edit, module_of
from .imports import imported
from .patch import Patch


def edits(patch: Patch) -> list[Edit]:
    """The edits of ``patch`` for the installed releases."""
    return [edit for edit in patch.edits if not edit.when or gate.satisfied(edit.when)]


def modules(patch: Patch) -> set[str]:
    """What ``patch`` edits, and the package that it repairs: an edit may be in torch, and the defect is not."""
    return {gate.module_name(patch.package), *map(module_of, edits(patch))}


def import_targets(patch: Patch) -> None:
    """Import what ``patch`` edits here; what cannot be imported stays missing."""
    for name in sorted(modules(patch)):
        with contextlib.suppress(ImportError, NotImplementedError):  # the latter from unsloth without a GPU
            importlib.import_module(name)


def missing(patch: Patch) -> set[str]:
    """Modules that ``patch`` edits, or whose package it repairs, and that are not imported whole."""
    return {name for name in modules(patch) if not imported(name)}


def packages(patch: Patch) -> set[str]:
    """Top-level modules on which it depends whether ``patch`` goes in."""
    edited = (module_of(edit).partition(".")[0] for edit in patch.edits)
    return {*map(gate.module_name, gate.packages(patch)), *edited}


def is_to_come(patch: Patch) -> bool:
    """Whether the package that ``patch`` repairs is not imported yet: nothing else about it matters until then."""
    return not imported(gate.module_name(patch.package))


def awaited(patch: Patch) -> set[str]:
    """Modules whose import can still change what becomes of ``patch``."""
    if is_to_come(patch):
        return {gate.module_name(patch.package)}
    unseen = {name for name in map(gate.module_name, gate.packages(patch)) if not imported(name)}
    return unseen | missing(patch)
