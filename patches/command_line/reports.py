"""What a program gets here: from the files of the installed packages, or in this process, with all of them imported."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from .. import autoload, second_name
from ..autoload import Settings
from ..engine import needs
from ..engine.library_files import LibraryFiles
from ..engine.report import Report, Result, Status
from ..process_registry import REGISTRY, registry_of_files
from . import notice, streams

_OFF = "PATCHES_AUTOLOAD is off: a program here gets no patch unless it calls patches.apply()"


def of_files(ids: Sequence[str]) -> Report:
    """Say what a fresh program here gets by itself, from the files of the packages; import none of them."""
    files = LibraryFiles()
    registry = registry_of_files(files)
    with _our_messages(None):
        settings = autoload.read_settings(registry)
        registry.disabled = settings.disabled
        report = registry.apply(*ids, untested=settings.untested)
        return _said(report, settings, files.errors, automatic=True)


def imported(ids: Sequence[str], automatic: bool = False) -> tuple[Report, str]:
    """Import what the patches are for, apply them, and report; ``automatic``: what a program here gets by itself.

    Returns also what the packages have printed meanwhile; empty if all went well.
    """
    chosen = [patch for patch in REGISTRY.ids.choose(tuple(ids)) if REGISTRY.is_for(patch)]
    packages = sorted({name.partition(".")[0] for patch in chosen for name in needs.modules(patch)})
    doing = f"importing {', '.join(packages)}"
    with notice.after_a_while(doing), streams.hold_back() as held, _our_messages(held.errors):
        settings = autoload.read_settings()
        with _without_autoload():  # while it imports: one way of applying is enough
            failed = REGISTRY.import_targets(*chosen)
        REGISTRY.disabled = settings.disabled
        # PATCHES_STRICT is for programs: here a conflict is a row
        report = REGISTRY.apply(*ids, untested=settings.untested)
    wrong = failed or report.with_status(Status.CONFLICT, Status.FAILED)
    return _said(report, settings, failed, automatic), held.text if wrong else ""


@contextlib.contextmanager
def _our_messages(stream: TextIO | None) -> Iterator[None]:
    """Write what our own code logs to ``stream``, by default to standard error."""
    log, handler = logging.getLogger("bnb_patches"), logging.StreamHandler(stream)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def _without_autoload() -> Iterator[None]:
    before = os.environ.get("PATCHES_AUTOLOAD")
    os.environ["PATCHES_AUTOLOAD"] = "0"
    try:
        yield
    finally:
        del os.environ["PATCHES_AUTOLOAD"]
        os.environ.update({"PATCHES_AUTOLOAD": before} if before is not None else {})


def _said(report: Report, settings: Settings, failed: Iterable[str], automatic: bool) -> Report:
    """Add what concerns the whole process; ``failed``: a sentence for each package that cannot be imported."""
    said = [second_name.describe_replaced_package(), *failed]
    if automatic and not settings.autoload:
        report = replace(report, results=tuple(map(_only_by_hand, report)))
        said.append(_OFF)
    return replace(report, notes=tuple(dict.fromkeys(filter(None, (*said, *report.notes)))))


def _only_by_hand(result: Result) -> Result:
    if result.status is not Status.APPLIED:
        return result
    reason = "PATCHES_AUTOLOAD is off; patches.apply() applies it"
    return replace(result, status=Status.AVAILABLE, reason=reason, changes=())
