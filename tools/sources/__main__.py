"""``make sources``: write the table of sources that the plugin ships, ``patches/newer_releases/sources.json``.

It has each release that a patch was tested on: those of the stacks (``tests/stacks/stacks.toml``), of ``tested_up_to``, and
those that were replayed (``docs/replay.json``) but for what did not hold there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import Version

from patches import REGISTRY
from patches.engine import definitions, gate, requirement
from patches.engine.patch import Part
from tools import stacks
from tools.commands import Failed

from .names import Names
from .rests_on import rests_on
from .wheel_files import ROOT, WheelFiles

TABLE = ROOT / "patches" / "newer_releases" / "sources.json"
REPLAYED = ROOT / "docs" / "replay.json"
BY_HAND = {"torch": ("2.14.1",), "torchao": ("0.14.1",), "bitsandbytes": ("0.50.0",)}
"""Releases that docs/releases.md names beside those of the stacks."""


def main() -> int:
    TABLE.write_text(text(table(tested())), "utf-8")
    found = json.loads(TABLE.read_text("utf-8"))
    print(f"{len(found['rests_on'])} patches rest on {sum(map(len, found['digests'].values()))} definitions; releases:")
    for package, releases in found["releases"].items():
        print(f"  {package}: {releases}")
    return 0


def parts() -> list[Part]:
    return [part for patch in REGISTRY.patches.values() for part in patch.parts]


def tested() -> dict[str, list[str]]:
    """Return the releases of each package that its patches were tested on, the oldest first."""
    found: dict[str, set[str]] = {part.package: {part.tested_up_to} for part in parts()}
    for part in parts():
        found[part.package] |= {part.tested_up_to, *BY_HAND.get(part.package, ())}
    for stack in stacks.declared().values():
        for package in found.keys() & stack.keys():
            found[package].add(stack[package])
    for package, releases in replayed().items():
        found[package] |= releases.keys()
    return {package: sorted(releases, key=Version) for package, releases in sorted(found.items())}


def replayed() -> Mapping[str, Mapping[str, Any]]:
    """Return what `make replay` found, by package and release."""
    found: dict[str, dict[str, Any]] = {}
    for name, said in json.loads(REPLAYED.read_text("utf-8")).items() if REPLAYED.exists() else ():
        package, _, release = name.partition("==")
        found.setdefault(package, {})[release] = said
    return found


def table(releases: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """Return the table for these releases."""
    rests: dict[str, set[str]] = {}
    digests: dict[str, dict[str, dict[str, list[str]]]] = {}
    for package, tested_releases in releases.items():
        own = [part for part in parts() if part.package == package]
        names = {release: Names(WheelFiles(package, release).text) for release in tested_releases}
        for release, known in names.items():
            for part in own:
                if is_for(part, release):
                    rests.setdefault(part.key, set()).update(rests_on(part, known))
        wanted = {name for part in own for name in (*rests.get(part.key, ()), *edited(part))}
        digests[package] = digests_of(wanted, names)
    for part in parts():
        rests[part.key] = rests.get(part.key, set()) - edited(part)
    return {"releases": releases, "rests_on": rests, "digests": digests}


def edited(part: Part) -> set[str]:
    """Return the targets of a part's edits in its own package."""
    own = gate.module_name(part.package)
    return {edit.target for edit in part.edits if edit.target.partition(":")[0].partition(".")[0] == own}


def is_for(part: Part, release: str) -> bool:
    needed = [requirement.parse(text) for text in part.requires]
    return all(each.contains(release) for each in needed if each.name == part.package)


def digests_of(wanted: Iterable[str], names: Mapping[str, Names]) -> dict[str, dict[str, list[str]]]:
    """Return for each definition its digests, each with the releases that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(wanted):
        module, _, path = name.partition(":")
        for release, known in names.items():
            digest = definitions.digest(known.tree(module), path)
            if digest != definitions.ABSENT:
                found.setdefault(name, {}).setdefault(digest, []).append(release)
        found.setdefault(name, {})
    return found


def text(found: Mapping[str, Any]) -> str:
    """Return the table as JSON: a definition on a line, so that a diff says what a release has changed."""
    rests = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(sorted(names))}" for key, names in sorted(found["rests_on"].items())
    )
    packages = []
    for package, definitions_of in found["digests"].items():
        rows = ",\n".join(
            f"{json.dumps(name)}: {json.dumps({digest: ' '.join(releases) for digest, releases in each.items()})}"
            for name, each in definitions_of.items()
        )
        packages.append(f"{json.dumps(package)}: {{\n{rows}\n}}")
    releases = json.dumps({package: " ".join(each) for package, each in found["releases"].items()})
    digests = ",\n".join(packages)
    return f'{{"releases": {releases},\n"rests_on": {{\n{rests}\n}},\n"digests": {{\n{digests}\n}}}}\n'


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
