"""A plugin of pytest: ``--every 40`` runs each 40th of the tests that were chosen."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--every", type=int, default=1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    items[:] = items[:: config.getoption("every")]
