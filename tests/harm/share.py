"""Where a case of the catalogue is run: every day, and with one patch alone, which takes most of the time.

Every day a case runs on the newest release, and each second on one of the older ones, the same each day; before a release
all run on all. On a processor that repacks 4-bit weights a third of the groups run every day.
With one patch alone, a program runs every day with half of the patches, the same each day, on one kind of layer that the
patch reaches; before a release with each and on all. What compiles runs every day with one patch in 24: that takes most of
the time. What hands over to a process without the plugin does so with a sixth of them, and with all patches at once.
With one patch alone, what compiles runs on one of the releases where it runs every day, and what does not on the newest
of those on which the patch edits the same source. ``HARM_EVERY_PAIR=1`` runs every pair everywhere.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

from patches import REGISTRY
from patches.engine import gate, requirement
from tests.releases import SHORT, alike, installed

from .catalogue import Case
from .layers import KINDS


def runs_here(case: Case, patch_id: str) -> bool:
    """Whether ``case`` is run with this patch alone on the release that is installed."""
    here = gate.installed_version("bitsandbytes")
    if os.environ.get("HARM_EVERY_PAIR") or here not in SHORT or not all(map(installed, SHORT)):
        return True
    fit = _releases(case, *REGISTRY.patches[patch_id].requires)
    if case.program.compiles:
        fit = [release for release in fit if release in _daily(case)] or fit
        return here == fit[zlib.crc32(f"{case.id} {patch_id}".encode()) % len(fit)]
    return here == [release for release in fit if release in alike(patch_id, here)][-1]


def runs_daily(case: Case) -> bool:
    """Whether ``make check`` runs ``case`` on the release that is installed; a release that it does not know runs all."""
    here = gate.installed_version("bitsandbytes")
    if case.packed:
        return zlib.crc32(case.group.encode()) % 3 == 1
    return here not in SHORT or here in _daily(case)


def one_of_each(cases: Iterable[Case], patch_id: str) -> list[Case]:
    """Of each program that runs with this patch alone every day one case, the same each day: all of them reach the patch."""
    chosen: dict[tuple[str, str], Case] = {}
    for case in sorted(cases, key=lambda case: zlib.crc32(f"{case.id} {patch_id}".encode())):
        if not _is_one_in(24 if case.program.compiles else 2, case, patch_id):
            continue
        chosen.setdefault((case.program.name, case.device), case)
    return list(chosen.values())


def hands_over_daily(case: Case, patch_id: str) -> bool:
    """Whether every day what the case has made with this patch alone goes on without it, as with all patches it does."""
    return _is_one_in(6, case, patch_id)


def _is_one_in(n: int, case: Case, patch_id: str) -> bool:
    return zlib.crc32(f"{patch_id} {case.program.name}".encode()) % n == 0


def _daily(case: Case) -> list[str]:
    """The newest release that has the case, and of each second case one of the older ones: the same for its group."""
    *older, newest = _releases(case)
    if not older or zlib.crc32(case.id.encode()) % 2:
        return [newest]
    return [older[zlib.crc32(case.group.encode()) % len(older)], newest]


def _releases(case: Case, *needs: str) -> list[str]:
    """Those of :data:`SHORT` that the case is for, and for which all of ``needs`` hold; oldest first."""
    needs = (*needs, case.program.when, KINDS[case.kind].when, "bitsandbytes>=0.49" if case.packed else "")
    return [release for release in SHORT if all(_fits(release, each) for each in needs)]


def _fits(release: str, needs: str) -> bool:
    asked = [requirement.parse(each) for each in needs.split(" and ") if each]
    return all(each.contains(release) for each in asked if each.name == "bitsandbytes")
