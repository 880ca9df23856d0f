"""Programs of the harm catalogue that an older stack can change: those of adapters and of offloading."""

from __future__ import annotations

import pytest

from tests.harm.known import marks
from tests.harm.rule import Trace
from tests.harm.test_catalogue import CASES
from tests.harm.verdicts import Verdicts

CHOSEN = [case for case in CASES if case.program.name.partition(".")[0] in ("adapters", "offload")]
VERDICTS = Verdicts(CHOSEN)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=marks(case.id, case.program.name)) for case in CHOSEN]
)
def test_program(case):
    judged = VERDICTS.of(case)
    unpatched, patched = judged.unpatched, judged.patched["all patches"]
    if _cannot_run(unpatched, patched):
        pytest.skip(f"this stack cannot run it, with the plugin or without: {unpatched.error}")
    assert not judged.faults, "\n".join([f"unpatched: {unpatched}", *judged.faults])


def _cannot_run(unpatched: Trace, patched: Trace) -> bool:
    """Whether the same error ends it both ways, and all that the plugin gives before that is right."""
    same = unpatched.error is not None and str(patched.error) == str(unpatched.error)
    return same and all(check.right for check in patched.checks)


def test_most_of_them_run():
    judged = [VERDICTS.of(case) for case in CHOSEN]
    unable = sum(_cannot_run(each.unpatched, each.patched["all patches"]) for each in judged)
    assert unable < len(CHOSEN) / 2
