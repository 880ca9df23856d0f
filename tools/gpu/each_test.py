"""A plugin of pytest: a line of JSON for each test as soon as it has ended, so that a run that is cut off leaves them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "PATCHES_EACH_TEST"
"""The file."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also of the tests of other processes, which pytest-xdist hands to the one that began."""
    file = os.environ.get(VARIABLE)
    if not file or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line = {"id": report.nodeid, "when": report.when, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if not report.passed:
        line["why"] = report.longreprtext[-3000:] or str(report.longrepr)[-3000:]
    with Path(file).open("a") as opened:
        opened.write(json.dumps(line) + "\n")
