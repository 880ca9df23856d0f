"""A plugin of pytest for peft's tests: what they ask the Hub for is in the cache already (``tools/upstream_models.py``).

peft's ``hub_online_once`` goes online for each model once and notes that in a dict. Here every model counts as noted.
"""

from __future__ import annotations

import sys
from typing import Any


class _Noted(dict[str, int]):
    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 1


def pytest_collection_finish(session: Any) -> None:
    helpers = sys.modules.get("tests.testing_utils")
    if helpers is not None and hasattr(helpers, "_HUB_MODEL_ACCESSES"):
        helpers._HUB_MODEL_ACCESSES = _Noted()
