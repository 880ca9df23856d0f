"""Which releases a patch is compared with: those that it was tested on itself."""

from __future__ import annotations

from patches import REGISTRY
from patches.newer_releases.source_table import SourceTable
from tests.newer_releases.copies import NUMBERS


def test_a_release_that_only_other_patches_were_tested_on_does_not_count():
    """The table has it for the package: a patch that did not hold there must not take its source for a tested one."""
    part = REGISTRY.patches["bitsandbytes-int8-input-dimensions"].parts[0]
    newer = NUMBERS[part.package]
    table = {
        "releases": {part.package: f"{part.tested_up_to} {newer}"},
        "failed": {},
        "rests_on": {},
        "digests": {part.package: {edit.target: {"old": part.tested_up_to, "new": newer} for edit in part.edits}},
    }
    compared = SourceTable(lambda _, names: dict.fromkeys(names, "new"), lambda: table).compare(part, newer)
    assert compared.release == part.tested_up_to and part.edits[0].target in compared.different
