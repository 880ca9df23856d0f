"""The questions of `adopt`, each asked in a process of its own in which patches are on trial."""

from __future__ import annotations

from ..process_registry import NEWER_RELEASES, REGISTRY
from ..verification import run_reproducer
from ..verification.worker import Answer
from .healthy_programs import PROGRAMS

SEPARATOR = "\n"
REPRODUCER, PROGRAM = f"{__name__}:run_reproducer_on_trial", f"{__name__}:run_program"
"""The functions of this module, as they are asked for."""
UNPATCHED, KNOWN = "unpatched", "known"
"""A program without patches, and with all that are applied here without `adopt`."""


def run_reproducer_on_trial(patch_id: str, name: str, phase: str, on_trial: str) -> Answer:
    """Run a reproducer in a phase of `verify`; ``on_trial``: keys of parts, one a line."""
    NEWER_RELEASES.on_trial = frozenset(on_trial.split(SEPARATOR))
    return run_reproducer(patch_id, name, phase)


def run_program(name: str, applied: str, on_trial: str) -> Answer:
    """Run a healthy program; return the digest of its results.

    ``applied`` is ``"unpatched"``, ``"known"`` or the id of the one patch to apply, or empty for all.
    """
    if applied not in (UNPATCHED, KNOWN):
        NEWER_RELEASES.on_trial = frozenset(on_trial.split(SEPARATOR))
    if applied != UNPATCHED:
        REGISTRY.apply(*([applied] if applied and applied != KNOWN else []))
    return True, PROGRAMS[name]()
