"""A package under another version number: its files as links, those that change as copies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.engine import gate, requirement

NUMBERS = {"bitsandbytes": "0.51.0", "transformers": "5.25.0", "peft": "0.22.0", "accelerate": "1.16.0"}
"""Newer than any that a patch was tested on, and in the range of each that the installed release is in."""


def copy(folder: Path, package: str, version: str, change: Mapping[str, Callable[[str], str]] | None = None) -> None:
    """Put ``package`` as it is installed into ``folder`` under ``version``.

    ``change`` gives for paths in it (``"nn/modules.py"``) what becomes of the text.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    source, target = Path(spec.origin).parent, folder / package
    changes = {"__init__.py": lambda text: _renumbered(text, version), **(change or {})}
    _link(source, target, {Path(path): function for path, function in changes.items()})
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    metadata = importlib.metadata.distribution(package).read_text("METADATA") or ""
    (info / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", metadata, count=1), "utf-8")


def _link(source: Path, target: Path, changes: Mapping[Path, Callable[[str], str]], here: Path = Path()) -> None:
    target.mkdir()
    parents = {parent for path in changes for parent in path.parents}
    for entry in source.iterdir():
        path = here / entry.name
        if path in changes:
            before = entry.read_text("utf-8")
            after = changes[path](before)
            assert after != before, f"{path} does not hold what was to be changed"
            (target / entry.name).write_text(after, "utf-8")
        elif path in parents:
            _link(entry, target / entry.name, changes, path)
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)


def _renumbered(text: str, version: str) -> str:
    return re.sub(r'(?m)^__version__ = ".*"', f'__version__ = "{version}"', text)


def replace(old: str, new: str) -> Callable[[str], str]:
    """Return a change of the first ``old``."""
    return lambda text: text.replace(old, new, 1)


def _in_the_same_ranges() -> bool:
    """Tell whether each patch and edit that is for an installed release is for its copy, and no other is."""
    parts = [part for patch in REGISTRY.patches.values() for part in patch.parts]
    texts = {text for part in parts for text in part.requires}
    texts |= {text for part in parts for edit in part.edits if edit.when for text in edit.when.split(" and ")}
    needed = [each for each in map(requirement.parse, texts) if each.name in NUMBERS]
    return all(
        each.contains(gate.recorded_version(each.name) or "") == each.contains(NUMBERS[each.name]) for each in needed
    )


NEEDS_NEWEST = pytest.mark.skipif(
    not (all(map(importlib.util.find_spec, NUMBERS)) and _in_the_same_ranges()),
    reason="the newest releases that patches were tested on are not installed: a copy would be another release",
)
