"""``make upstream TESTS=<folder>``: bitsandbytes' own CPU tests, unpatched and patched, outcome by outcome.

``TESTS`` is the folder ``tests`` of a checkout of bitsandbytes at the release that is installed; nothing of it is kept
here. A test whose outcome differs is a fault of ours, unless it asserts the very defect: those are named below.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

EXPECTED = {"test_linear_kbit_fp32_bias": "asserts a bias in float32 that was truncated to the input's dtype"}
"""Tests that pass only with a defect that is repaired, and what they assert."""


def outcomes(tests: Path, patched: bool, arguments: Sequence[str]) -> dict[str, str]:
    """Every test that ran, and what came of it: ``passed``, ``skipped`` or the first line of what it raised."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "outcomes.xml"
        environ = {
            **os.environ,
            "BNB_TEST_DEVICE": "cpu",
            "PATCHES_AUTOLOAD": str(int(patched)),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--junitxml", str(log)]
        done = subprocess.run([*command, *arguments, tests.name], cwd=tests.parent, env=environ,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        if not log.exists() or done.returncode > 1:
            sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return {
            f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in ET.parse(log).iter("testcase")
        }


def _outcome(case: ET.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return f"{child.tag}: {(child.get('message') or '').partition(chr(10))[0]}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def differences(unpatched: dict[str, str], patched: dict[str, str]) -> list[tuple[str, str, str]]:
    """Name, outcome without the plugin, outcome with it, of each test that differs in more than its message."""

    def kind(outcome: str) -> str:
        return outcome.partition(":")[0]

    names = dict.fromkeys((*unpatched, *patched))
    rows = ((name, unpatched.get(name, "did not run"), patched.get(name, "did not run")) for name in names)
    return [row for row in rows if kind(row[1]) != kind(row[2])]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make upstream", description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the folder `tests` of a checkout of bitsandbytes")
    options, arguments = parser.parse_known_args(argv)
    if not (options.tests / "conftest.py").exists():
        print(f"{options.tests} is not the folder `tests` of a checkout of bitsandbytes", file=sys.stderr)
        return 2
    results = [outcomes(options.tests.resolve(), patched, arguments) for patched in (False, True)]
    for label, found in zip(("unpatched", "patched"), results):
        counts = Counter(outcome.partition(":")[0] for outcome in found.values())
        print(f"{label:<10} " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    bad = 0
    for name, before, after in differences(*results):
        known = next((why for test, why in EXPECTED.items() if f"::{test}" in name), "")
        bad += not known
        print(
            f"{name}\n    unpatched  {before}\n    patched    {after}"
            + (f"\n    expected: it {known}" if known else "")
        )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
