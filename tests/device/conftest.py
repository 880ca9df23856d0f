"""What the cases share. They run in a process that has the simulated device: see :mod:`tests.device`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch

import patches
from tests import device as simulated

KIND = simulated.kind()
GPUS = 0 if KIND else torch.cuda.device_count()
LOG = {"watch", "simulated"}
"""Names by which a case asks what the simulated device has logged."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The first of the two devices; the GPU of a machine that has one, for what needs no log."""
    if not KIND and not GPUS:
        pytest.skip(f"needs the simulated device: {simulated.VARIABLE}={'|'.join(simulated.KINDS)}")
    if not KIND and LOG & _names(request.function):
        pytest.skip("counts what the simulated device logs; a GPU logs nothing")
    return f"{KIND or 'cuda'}:0"


def _names(function: FunctionType) -> set[str]:
    """Those that ``function`` and the functions beside it in its file, as far as it calls them, look up."""
    found: set[str] = set()
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        new = set(code.co_names) - found
        found |= new
        beside = (function.__globals__.get(name) for name in new)
        codes += [
            each.__code__
            for each in beside
            if getattr(each, "__module__", "") == function.__module__ and isinstance(each, FunctionType)
        ]
    return found


@pytest.fixture
def other() -> str:
    """The second one."""
    if not KIND and GPUS < 2:
        pytest.skip("needs two devices")
    return f"{KIND or 'cuda'}:1"


@pytest.fixture
def only_simulated() -> None:
    """The case is about the simulated device itself."""
    if not KIND:
        pytest.skip("is about the simulated device itself")


@pytest.fixture
def by_the_name_of_cuda() -> None:
    """The code under test asks for "cuda" by name."""
    if KIND != "cuda" and not GPUS:
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
