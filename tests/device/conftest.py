"""What the cases share. They run in a process that has the simulated device: see :mod:`tests.device`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import patches
from tests import device as simulated

KIND = simulated.kind()


@pytest.fixture
def device() -> str:
    """The first of the two devices."""
    if not KIND:
        pytest.skip(f"needs the simulated device: {simulated.VARIABLE}={'|'.join(simulated.KINDS)}")
    return f"{KIND}:0"


@pytest.fixture
def other() -> str:
    """The second one."""
    return f"{KIND}:1"


@pytest.fixture
def by_the_name_of_cuda() -> None:
    """The code under test asks for "cuda" by name."""
    if KIND != "cuda":
        pytest.skip('for a device that is not called "cuda" upstream has no such path')


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    """All patches, once for a module of cases; the reason for scope is the time that applying them takes."""
    patches.apply()
    yield
    patches.revert()


@pytest.fixture(autouse=True, scope="module")
def unpatched() -> Iterator[None]:
    """As in the suite, but once for a module."""
    assert not patches.report().with_status(patches.Status.APPLIED, patches.Status.SHADOWED)
    yield
    patches.revert()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with two decoder layers."""
    from tests.device.models import save_llama

    return save_llama(tmp_path_factory.mktemp("llama"))
