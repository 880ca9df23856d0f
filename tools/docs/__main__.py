"""``python -m tools.docs [PYTHON]``: write what the site is built of beside what is written by hand.

PYTHON is one that has the packages that are repaired; without it the pages have no diffs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from patches import REGISTRY

from . import DOCS, architectures, commands, figures, gpu, image_models, page, replay, reports, stacks, symptoms

PAGES, FRAGMENTS = DOCS / "patches", DOCS / "generated"


def files(found: Sequence[reports.Report] = ()) -> dict[Path, str]:
    """Every file that the build writes, with its text."""
    measured = figures.read()
    pages = {
        PAGES / f"{patch.id}.md": page.page(patch, measured, reports.seen(patch.id, found))
        for patch in REGISTRY.patches.values()
    }
    return {
        **pages,
        **{PAGES / f"{name}.md": text for name, text in page.groups(REGISTRY.patches).items()},
        PAGES / "index.md": page.index(REGISTRY.patches),
        FRAGMENTS / "symptoms.md": symptoms.fragment(),
        FRAGMENTS / "commands.md": commands.fragment(),
        FRAGMENTS / "stacks.md": stacks.fragment(),
        FRAGMENTS / "replay.md": replay.fragment(),
        FRAGMENTS / "architectures.md": architectures.fragment(),
        FRAGMENTS / "image_models.md": image_models.fragment(),
        FRAGMENTS / "gpu.md": gpu.fragment(),
    }


def main(arguments: Sequence[str]) -> None:
    new = files(reports.collect(arguments[0]) if arguments else ())
    for folder in (PAGES, FRAGMENTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for path, text in new.items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
