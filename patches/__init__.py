"""Repairs quantized fine-tuning (bitsandbytes, transformers, peft, torchao) in the running process.

    import patches
    patches.apply()     # idempotent; what is not imported yet follows when it is
    print(patches.report())
    patches.revert()

Distribution name ``bnb-patches``. Every patch is gated on the installed releases and on the exact
source found, can be taken out again, and brings a reproducer of its defect (``patches.verify()``).
"""

from __future__ import annotations

from typing import Any

from . import catalog as _catalog
from .patch import CannotShow, Change, Finding, Patch, Report, Result, Status
from .ranks import RanksDiffer, check_ranks
from .registry import PatchError, Registry

__all__ = [
    "CannotShow",
    "Change",
    "Finding",
    "Patch",
    "PatchError",
    "RanksDiffer",
    "Report",
    "Result",
    "Status",
    "applied",
    "apply",
    "check_ranks",
    "report",
    "revert",
    "verify",
]

__bnb_patches__ = True
"""Tells this package from another of the same name."""

REGISTRY = Registry(_catalog.patches())
applied = REGISTRY.applied
revert = REGISTRY.revert
report = REGISTRY.report


def apply(*ids: str, strict: bool | None = None, untested: bool | None = None) -> Report:
    """Apply the named patches, or all. See :meth:`patches.registry.Registry.apply`.

    ``strict`` and ``untested`` default to ``PATCHES_STRICT`` and ``PATCHES_UNTESTED``;
    ``PATCHES_DISABLE`` is obeyed.
    """
    from . import autoload

    settings = autoload.Settings.read(REGISTRY.patches)
    REGISTRY.disabled = settings.disabled
    return REGISTRY.apply(
        *ids,
        strict=settings.strict if strict is None else strict,
        untested=settings.untested if untested is None else untested,
    )


def verify(*ids: str, jobs: int | None = None) -> Any:
    """Run the reproducers in fresh processes. See :func:`patches.verification.verify`."""
    from . import verification

    return verification.verify(*ids, jobs=jobs)
