"""Which tests `make test` runs, and how many tests of each command must pass.

`make test` tells whether a change breaks something: the contract of each patch, the engine, one program of a user for each
group of patches, each program of the catalogue of harm once, and the programs of the pages. `make check` runs the other
tests of the newest release, and what older releases and stacks can change.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
OF_TEST = (
    "engine",
    "harm/test_each_program.py",
    "inspection",
    "programs/test_flows.py",
    "programs/test_stack.py",
    "test_contract.py",
    "test_pages.py",
    "test_shim.py",
    "test_sources.py",
)
"""What `make test` runs, below ``tests``; of these files, tests marked ``check`` are left to `make check`."""
MARKS = {
    "test": "not slow and not release and not check",
    "check": "check and not slow and not release",
    "both": "not slow and not release",
}
"""Which tests a command runs on the newest release; on an older one `make check` runs both parts of a file."""
AT_LEAST = {"test": 1_230, "check": 5_400}
"""Fewer tests that pass are an error: those that were there when this was written, less a twentieth."""


def is_in_test(path: Path) -> bool:
    """Tell whether `make test` runs the file of tests ``path``."""
    name = path.relative_to(TESTS).as_posix()
    return any(name == each or name.startswith(f"{each}/") for each in OF_TEST)
