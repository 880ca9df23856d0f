"""What the patches change in each release that lies in ``.bnb``: the reports of processes that apply all of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version

from . import BUILD, ROOT

KEPT = BUILD / "reports"
Report = Mapping[str, Any]
"""What ``python -m patches report --live --json`` says."""


@dataclass
class Seen:
    """The diffs of one patch, and the releases in which they are these: of its package, and of bitsandbytes."""

    package: str
    diffs: tuple[str, ...] = ()
    releases: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)


def collect(python: str, folder: Path = ROOT / ".bnb") -> list[Report]:
    """A report for each release of bitsandbytes, or one of what ``python`` has installed; oldest first.

    Each takes ten seconds, so they are kept until a patch, the engine or the stack is another.
    """
    found = {path.name: path for path in folder.glob("*") if any(path.glob("bitsandbytes-*.dist-info"))}
    releases = sorted(found, key=Version)
    if not releases:
        return [_made(python, None)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(partial(_kept, python), [found[release] for release in releases]))


def seen(patch_id: str, reports: Iterable[Report]) -> list[Seen]:
    """What ``patch_id`` changes, releases with the same change together; of each the newest shows its lines."""
    groups: dict[tuple[str, ...], Seen] = {}
    for report in reports:
        result = next((r for r in report["results"] if r["id"] == patch_id and r["changes"]), None)
        if result is None:
            continue
        package, version = next(iter(result["versions"].items()))
        diffs = tuple(change["diff"] for change in result["changes"])
        group = groups.setdefault(tuple(map(_without_numbers, diffs)), Seen(package))
        group.diffs = diffs
        _add(group.releases, version)
        _add(group.beside, result["versions"].get("bitsandbytes"))
    return list(groups.values())


def _add(releases: list[str], version: str | None) -> None:
    short = (version or "").partition("+")[0]
    if short and short not in releases:
        releases.append(short)


def _without_numbers(diff: str) -> str:
    return re.sub(r"^@@ .*? @@", "@@", diff, flags=re.MULTILINE)


def _kept(python: str, release: Path) -> Report:
    """The report of ``release``, from the file that is named after all that it is made of if there is one."""
    digest = hashlib.sha256(python.encode())
    for file in [*sorted((ROOT / "patches").rglob("*.py")), ROOT / "constraints.txt"]:
        digest.update(file.read_bytes())
    path = KEPT / f"{release.name}-{digest.hexdigest()[:16]}.json"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_made(python, release)), "utf-8")
    report: Report = json.loads(path.read_text("utf-8"))
    return report


def _made(python: str, release: Path | None) -> Report:
    path = os.pathsep.join(str(entry) for entry in (release, ROOT) if entry)
    env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "1"}  # without it a report has no changes
    command = [python, "-m", "patches", "report", "--live", "--json"]  # with the values that an import makes
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):  # 1: a patch does not fit, which is for the tests to say
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    report: Report = json.loads(done.stdout)
    if not any(result["changes"] for result in report["results"]):
        raise RuntimeError(f"{' '.join(command)}: no patch is applied, so that no page would have a diff")
    return report
