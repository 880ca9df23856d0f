"""What a patch needs here: which of its edits are for the installed releases, and which modules must be imported."""

from __future__ import annotations

import importlib

from . import gate
from .edits import Edit, module_of
from .libraries import IMPORTED, Libraries
from .patch import Part, Patch


def edits(patch: Patch | Part, libraries: Libraries = IMPORTED) -> list[Edit]:
    """Return the edits of ``patch`` for the installed releases; of several parts, of the parts that fit these releases."""
    parts = patch.parts
    if len(parts) > 1:
        parts = tuple(part for part in parts if gate.satisfied(" and ".join(part.requires), libraries))
    return [edit for part in parts for edit in part.edits if not edit.when or gate.satisfied(edit.when, libraries)]


def modules(patch: Patch | Part, libraries: Libraries = IMPORTED) -> set[str]:
    """Return the modules that ``patch`` edits, and the packages that it repairs: an edit may be in torch, and the defect is not."""
    return {*(gate.module_name(part.package) for part in patch.parts), *map(module_of, edits(patch, libraries))}


def import_targets(*patches: Patch | Part) -> list[str]:
    """Import the modules that ``patches`` edit here, each package once; return a sentence for each that cannot be imported.

    There is none for a package or module that is absent: the report says so. A package that was built for another torch
    may raise any error.
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
    """Import module ``name``; return why that failed, an empty string if the report says it, None if it did not fail."""
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


def modules_not_imported(patch: Part, libraries: Libraries = IMPORTED) -> set[str]:
    """Return the modules that ``patch`` edits, and the package that it repairs, as far as they are not imported whole."""
    return {name for name in modules(patch, libraries) if not libraries.is_imported(name)}


def packages(patch: Patch | Part) -> set[str]:
    """Return the top-level modules whose import can decide whether ``patch`` is applied."""
    edited = (module_of(edit).partition(".")[0] for part in patch.parts for edit in part.edits)
    return {*map(gate.module_name, gate.packages(patch)), *edited}


def is_package_imported(patch: Part, libraries: Libraries = IMPORTED) -> bool:
    """Tell whether the package that ``patch`` repairs is imported: nothing else matters until then."""
    return libraries.is_imported(gate.module_name(patch.package))


def modules_to_wait_for(patch: Part, libraries: Libraries = IMPORTED) -> set[str]:
    """Return the modules whose import can still decide whether ``patch`` is applied."""
    if not is_package_imported(patch, libraries):
        return {gate.module_name(patch.package)}
    unseen = {name for name in map(gate.module_name, gate.packages(patch)) if not libraries.is_imported(name)}
    return unseen | modules_not_imported(patch, libraries)
