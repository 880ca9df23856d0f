"""The one registry of this process: every patch, and its changes."""

from __future__ import annotations

from dataclasses import replace

from . import stacks
from .engine import catalog, compiler
from .engine.build import Builder
from .engine.registry import Registry
from .engine.report import Report
from .experts import dense_operations
from .loading import placement_summary
from .process import compiled_code, live_objects


class _OverStacks(Registry):
    """Says in the report which tested stack is nearest, where models that do not fit are, and what made experts dense."""

    def report(self, *ids: str) -> Report:
        found = super().report(*ids)
        return (
            found
            if ids
            else replace(
                found,
                notes=(
                    *found.notes,
                    *stacks.report_notes(),
                    *placement_summary.report_notes(),
                    *dense_operations.report_notes(),
                ),
            )
        )


REGISTRY = _OverStacks(
    catalog.patches(),
    compiled_code.forget_compiled_code,
    live_objects.one_walk,
    Builder(compiler.compiler()),
    stacks.oldest_releases(),
)
