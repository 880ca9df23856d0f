"""``make sources``: write the table of sources that the plugin ships, ``patches/newer_releases/sources.json``.

It has each release that a patch was tested on: those of the stacks (``tests/stacks/stacks.toml``), of ``tested_up_to``, and
those that were replayed (``docs/replay.json``) but for what did not hold there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from tools import stacks
from tools.commands import Failed

from . import replayed
from .gathered import Gathered, parts
from .wheel_files import ROOT

TABLE = ROOT / "patches" / "newer_releases" / "sources.json"
BY_HAND = {"torch": ("2.14.1",), "torchao": ("0.14.1",), "bitsandbytes": ("0.50.0",)}
"""Releases that docs/releases.md names beside those of the stacks."""


def main() -> int:
    TABLE.write_text(text(Gathered().table(tested(), replayed.failed())), "utf-8")
    found = json.loads(TABLE.read_text("utf-8"))
    print(f"{len(found['rests_on'])} patches rest on {sum(map(len, found['digests'].values()))} definitions; releases:")
    for package, releases in found["releases"].items():
        print(f"  {package}: {releases}")
    return 0


def tested() -> dict[str, list[str]]:
    """Return the releases of each package that its patches were tested on, the oldest first."""
    found: dict[str, set[str]] = {part.package: {part.tested_up_to} for part in parts()}
    for part in parts():
        found[part.package] |= {part.tested_up_to, *BY_HAND.get(part.package, ())}
    for stack in stacks.declared().values():
        for package in found.keys() & stack.keys():
            found[package].add(stack[package])
    for package in found:
        found[package] |= replayed.releases(package)
    return {package: sorted(releases, key=Version) for package, releases in sorted(found.items())}


def text(found: Mapping[str, Any]) -> str:
    """Return the table as JSON: a definition on a line, so that a diff says what a release has changed."""
    rests = _lines(found["rests_on"])
    digests = ",\n".join(f"{json.dumps(package)}: {{\n{_lines(each)}\n}}" for package, each in found["digests"].items())
    releases, failed = json.dumps(found["releases"]), json.dumps(found["failed"], sort_keys=True)
    return f'{{"releases": {releases},\n"failed": {failed},\n"rests_on": {{\n{rests}\n}},\n"digests": {{\n{digests}\n}}}}\n'


def _lines(rows: Mapping[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
