"""The one registry of this process: every patch, and its changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import tested_stacks
from .engine import catalog, compiler, gate
from .engine.build import Builder
from .engine.registry import Registry
from .engine.report import Report
from .experts import dense_operations
from .loading import placement_summary
from .newer_releases import NewerReleases
from .process import compiled_code, live_objects

if TYPE_CHECKING:
    from .engine.library_files import LibraryFiles  # for a command alone: no program that imports us needs it


class _PluginRegistry(Registry):
    """Adds to the report the nearest tested stack, where parts of models were placed, and what made experts dense."""

    def report(self, *ids: str) -> Report:
        found = super().report(*ids)
        if ids:
            return found
        notes = (*tested_stacks.report_notes(self.libraries), *NEWER_RELEASES.report_notes())
        notes += (*placement_summary.report_notes(), *dense_operations.report_notes())
        return replace(found, notes=(*found.notes, *notes))


_COMPILER = compiler.compiler()
_PATCHES = catalog.patches()
NEWER_RELEASES = NewerReleases(_COMPILER.digests)

_LIMITS = gate.Limits(tested_stacks.oldest_releases(), gate.newest_tested(_PATCHES), NEWER_RELEASES.judge)

REGISTRY = _PluginRegistry(
    _PATCHES, compiled_code.forget_compiled_code, live_objects.one_walk, Builder(_COMPILER), _LIMITS
)


def registry_of_files(files: LibraryFiles) -> Registry:
    """Make a registry that applies to stand-ins of the installed packages, made from ``files``; nothing is imported."""
    return _PluginRegistry(map(files.readable, _PATCHES), builder=Builder(_COMPILER), limits=_LIMITS, libraries=files)
