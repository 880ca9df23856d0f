"""What ``docs/replay.json`` says: which reproducers failed on which past release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .wheel_files import ROOT

FILE = ROOT / "docs" / "replay.json"


def by_release(file: Path = FILE) -> Mapping[str, Any]:
    """Return what ``verify`` said, by ``"package==release"``."""
    return json.loads(file.read_text("utf-8")) if file.exists() else {}  # type: ignore[no-any-return]


def releases(package: str) -> set[str]:
    """Return the releases of ``package`` that were run."""
    return {name.partition("==")[2] for name in by_release() if name.partition("==")[0] == package}


def failed() -> dict[str, set[str]]:
    """Return by key of a part the releases of its package on which its reproducer failed."""
    found: dict[str, set[str]] = {}
    for name, said in by_release().items():
        for key in wrong(said):
            found.setdefault(key, set()).add(name.partition("==")[2])
    return found


def wrong(said: Mapping[str, Any]) -> set[str]:
    """Return the keys of the parts whose reproducer failed on a release; ``said``: what ``verify`` said there."""
    rows = [row for row in said.get("verify", ()) if row["verdict"] == "wrong"]
    return {": ".join(filter(None, (row["id"], row.get("part")))) for row in rows}
