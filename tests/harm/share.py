"""What compiles is run with one patch alone on one release only: such runs are a third of all the time.

With all patches everything runs on every release. ``HARM_EVERY_PAIR=1`` runs each patch alone too.
"""

from __future__ import annotations

import os
import zlib

from packaging.requirements import Requirement

from patches import REGISTRY
from patches.engine import gate

from .catalogue import Case
from .layers import KINDS

RELEASES = ("0.46.1", "0.48.2", "0.49.2", "0.50.2")
"""Those of bitsandbytes that share the runs between them; on any other, each is made."""


def runs_here(case: Case, patch_id: str) -> bool:
    """Whether ``case`` is run with this patch alone on the release that is installed."""
    installed = gate.installed("bitsandbytes")
    if not case.program.compiles or os.environ.get("HARM_EVERY_PAIR") or installed not in RELEASES:
        return True
    needs = [case.program.when, KINDS[case.kind].when, *REGISTRY.patches[patch_id].requires]
    needs += ["bitsandbytes>=0.49"] if case.packed else []
    fit = [release for release in RELEASES if all(_fits(release, each) for each in needs)]
    return installed == fit[zlib.crc32(f"{case.id} {patch_id}".encode()) % len(fit)]


def _fits(release: str, needs: str) -> bool:
    asked = [Requirement(each) for each in needs.split(" and ") if each]
    return all(each.specifier.contains(release) for each in asked if each.name == "bitsandbytes")
