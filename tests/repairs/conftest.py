"""What the tests of offloaded models share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny Llama."""
    from tests.repairs.peft.offloading import save_base

    return save_base(tmp_path_factory.mktemp("offloaded") / "base")
