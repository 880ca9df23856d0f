"""The parts of the site that are written by the build: ``python -m tools.docs``, see ``make docs``.

A page for each patch, the table of all, "find your defect" and the help of the commands. None of it is
committed, so none of it can say what is no longer so. Needs `packaging` and nothing of what is repaired.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "docs"
