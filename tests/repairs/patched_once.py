"""All patches, once for the file of tests that imports the fixture: ``from tests.repairs.patched_once import unpatched``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import patches


@pytest.fixture(scope="module", autouse=True)
def unpatched() -> Iterator[None]:
    """Has the name of the one in ``conftest.py``, which it replaces: no test there begins unpatched."""
    with patches.applied():
        yield
