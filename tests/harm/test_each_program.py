"""Each program of the catalogue on one kind of layer, without the plugin and with all patches; :mod:`.test_catalogue` has the rest."""

from __future__ import annotations

import zlib

import pytest

from tests.conftest import _devices

from .catalogue import PROGRAMS, Case, cases
from .known import marks
from .verdicts import Verdicts, selected_cases


def chosen() -> list[Case]:
    """Return one case of each program and device, the same each day; of the programs that compile each fourth."""
    found: dict[tuple[str, str], Case] = {}
    for case in sorted(cases(_devices(), False), key=lambda case: zlib.crc32(case.id.encode())):
        if not case.program.compiles or zlib.crc32(case.program.name.encode()) % 4 == 0:
            found.setdefault((case.program.name, case.device), case)
    return list(found.values())


CASES = chosen()


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    """The verdicts on the cases that this run selects."""
    return Verdicts(selected_cases(request), alone=False)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=marks(case.id, case.program.name)) for case in CASES]
)
def test_program(case: Case, verdicts: Verdicts) -> None:
    judged = verdicts.of(case)
    assert not judged.faults, "\n".join([f"unpatched: {judged.unpatched}", *judged.faults])


def test_most_programs_are_chosen() -> None:
    assert len({case.program.name for case in CASES}) > 0.7 * len(PROGRAMS)
