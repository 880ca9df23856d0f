"""``python -m tools.replay.verified [PACKAGE==RELEASE ...]``: each patch on each release of the package that it repairs.

Each release lies alone in ``.replay``, on top of what is installed here, beside no more than it needs: the other packages
are the newest. There ``verify`` runs the reproducers of the patches of this package, and what it says goes into
``docs/replay.json``. A release that stands there already is not run again unless it is named, or with ``IDS``, which is about
the rows of these patches only, of the releases that stand there. Which there are the index says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from patches.process_registry import REGISTRY
from tools.commands import Failed, expect, run
from tools.replay import OLDEST
from tools.sources import replayed
from tools.sources.replayed import FILE as RESULTS
from tools.sources.wheel_files import releases as offered
from tools.stacks import (
    NOT_EVERYWHERE,
    PACKAGES,
    ROOT,
    VERSIONS,
    Place,
    as_lines,
    declared,
    installed,
    printed,
    said,
    slug,
)


class Neighbours(NamedTuple):
    """What a release from ``since`` on needs: ``beside`` of a stack of the table, and its release of ``packages``.

    Without the torchao of that stack where ``torchao`` is false: peft from 0.19 on refuses it.
    """

    since: str
    stack: str
    packages: tuple[str, ...] = ()
    torchao: bool = False


NEIGHBOURS = {
    "transformers": (
        Neighbours("5.0", "transformers 5.10"),
        Neighbours("5.16", "axolotl 0.19.0"),
        Neighbours("5.18", "newest"),
    ),
    "peft": (  # each with a transformers of its time: older ones import names that are gone since
        Neighbours("0.14", "oldest", ("transformers",), torchao=True),
        Neighbours("0.15", "transformers 4.53", ("transformers",), torchao=True),
        Neighbours("0.17", "transformers 4.55", ("transformers",), torchao=True),
        Neighbours("0.18", "transformers 4.57", ("transformers",), torchao=True),
        Neighbours("0.19", "transformers 5.10", ("transformers",)),
        Neighbours("0.20", "axolotl 0.19.0", ("transformers",)),
        Neighbours("0.21", "newest"),
    ),
    "bitsandbytes": (Neighbours("0.46", "newest"),),
    "accelerate": (Neighbours("1.1", "newest"),),
    "diffusers": (  # before 0.37 it imports names that transformers 5.1 and torchao 0.15 have not
        Neighbours("0.33", "transformers 4.57", ("transformers", "peft", "accelerate"), torchao=True),
        Neighbours("0.37", "unsloth 2026.10.9", ("transformers",)),
        Neighbours("0.42", "newest"),
    ),
}


class Release(NamedTuple):
    """One release of a package, and what is run of it."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"

    def folders(self) -> list[Path]:
        """What goes first on the path: the release, and its neighbours, which it shares with others."""
        there = ROOT / ".bnb" / self.version
        if self.package == "bitsandbytes" and there.is_dir():
            alone = there
        else:
            alone = _laid(f"{self.package}-{self.version}", str(self))
        return [alone, *self._neighbours()]

    def _neighbours(self) -> list[Path]:
        of = [one for one in NEIGHBOURS[self.package] if Version(one.since) <= Version(self.version)][-1]
        stack = declared()[of.stack]
        what = [f"{name}=={stack[name]}" for name in of.packages]
        what += [text for text in stack.get("beside", ()) if of.torchao or not text.startswith("torchao=")]
        return [_laid("-".join(["beside", *of.packages, slug(of.stack)]), *what)] if what else []

    def verified(self) -> dict[str, Any]:
        """The versions that it was run with, and the verdict of each part of a patch that is about this package."""
        path = os.pathsep.join(map(str, (*self.folders(), ROOT)))
        place = Place(Path(sys.executable), {"PYTHONPATH": path, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"})
        packages = [name for name in PACKAGES if name == self.package or name not in NOT_EVERYWHERE]
        versions = json.loads(run(place.python, "-c", VERSIONS, *packages, cwd=ROOT, **place.environ))
        expect(versions[self.package] == self.version, f"{self} is hidden by {versions[self.package]}")
        run(place.python, "-c", f"import {', '.join(versions)}", cwd=ROOT, **place.environ)  # one is too new for it
        parts = {(patch.id, part.name) for patch in REGISTRY.patches.values() for part in patch.parts
                 if part.package == self.package}  # fmt: skip
        ids = sorted({patch_id for patch_id, _ in parts if not _some() or patch_id in _some()})
        expect(bool(ids), f"{self}: no patch of {self.package} is named {' or '.join(_some())}")
        rows = said(printed(place, "patches", "verify", "--json", "--jobs", "1", *ids)["rows"])
        return {"versions": versions, "verify": [row for row in rows if (row["id"], row.get("part", "")) in parts]}


def main(arguments: Sequence[str]) -> int:
    if unknown := [text for text in arguments if text.partition("==")[0] not in OLDEST or "==" not in text]:
        print(f"{unknown[0]!r} is no release: PACKAGE==RELEASE, of {', '.join(OLDEST)}", file=sys.stderr)
        return 2
    named = [Release(*text.split("==")) for text in arguments]
    failed = 0
    for release in named or [release for release in releases() if (str(release) in _known()) is bool(_some())]:
        began = time.monotonic()
        try:
            found = release.verified()
        except Failed as why:
            failed += 1
            print(f"{release}: {why}", file=sys.stderr, flush=True)
            continue
        keep(release, found)
        verdicts = Counter(row["verdict"] for row in found["verify"])
        print(f"{release}: {dict(verdicts)}, {time.monotonic() - began:.0f} s", flush=True)
    return bool(failed)


def releases() -> list[Release]:
    """All that are to be run: the packages in their order, of each the newest first."""
    return [Release(package, version) for package in OLDEST for version in chosen(package, offered(package))]


def chosen(package: str, offered: Sequence[str]) -> list[str]:
    """Those of the releases ``offered`` that are run, the newest first."""
    return sorted((v for v in offered if Version(v) >= Version(OLDEST[package])), key=Version, reverse=True)


def keep(release: Release, found: dict[str, Any]) -> None:
    """Write what was ``found`` at once: a run that is interrupted goes on where it was."""
    known = _known()
    if _some():
        rows = {(row["id"], row.get("part", "")): row for row in known.get(str(release), {}).get("verify", [])}
        rows |= {(row["id"], row.get("part", "")): row for row in found["verify"]}
        found = {**found, "verify": [rows[name] for name in sorted(rows)]}
    known[str(release)] = found
    order = sorted(known, key=lambda name: Version(name.partition("==")[2]), reverse=True)
    order.sort(key=lambda name: list(OLDEST).index(name.partition("==")[0]))
    RESULTS.write_text(as_lines({name: known[name] for name in order}), "utf-8")


def _some() -> list[str]:
    return os.environ.get("IDS", "").split()


def _known() -> dict[str, Any]:
    return dict(replayed.by_release(RESULTS))


def _laid(name: str, *what: str) -> Path:
    return installed(ROOT / ".replay" / name, "--no-deps", *what)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
