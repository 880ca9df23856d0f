"""Where a case of the catalogue is run with one patch alone: such runs take most of the time.

With all patches everything runs on every release. With one alone, what compiles runs on one release, and what does not
on the newest of those on which the patch edits the same source. ``HARM_EVERY_PAIR=1`` runs every pair everywhere.
"""

from __future__ import annotations

import os
import zlib

from patches import REGISTRY
from patches.engine import gate, requirement
from tests.releases import SHORT, alike, installed

from .catalogue import Case
from .layers import KINDS


def runs_here(case: Case, patch_id: str) -> bool:
    """Whether ``case`` is run with this patch alone on the release that is installed."""
    here = gate.installed("bitsandbytes")
    if os.environ.get("HARM_EVERY_PAIR") or here not in SHORT or not all(map(installed, SHORT)):
        return True
    needs = [case.program.when, KINDS[case.kind].when, *REGISTRY.patches[patch_id].requires]
    needs += ["bitsandbytes>=0.49"] if case.packed else []
    fit = [release for release in SHORT if all(_fits(release, each) for each in needs)]
    if case.program.compiles:
        return here == fit[zlib.crc32(f"{case.id} {patch_id}".encode()) % len(fit)]
    return here == [release for release in fit if release in alike(patch_id, here)][-1]


def _fits(release: str, needs: str) -> bool:
    asked = [requirement.parse(each) for each in needs.split(" and ") if each]
    return all(each.contains(release) for each in asked if each.name == "bitsandbytes")
