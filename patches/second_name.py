"""Tell whether ``import patches`` gives our package, as far as the files of this installation say."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys


def describe_replaced_package() -> str:
    """Describe another distribution that has put its ``patches/__init__.py`` over ours; empty if there is none."""
    folder = sys.modules[__name__.partition(".")[0]].__path__[0]
    try:
        with open(os.path.join(folder, "__init__.py"), encoding="utf-8") as file:
            if "__bnb_patches__ = True" in file.read():
                return ""
    except OSError:
        if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, "__init__.pyc")):
            return ""  # an archive, or an installation without sources
    owners = sorted(set(_owners()) - {"bnb-patches"}) or ["another package"]
    return (
        f"{os.path.join(folder, '__init__.py')} was replaced by {' and '.join(owners)}: `import patches` gives that "
        "package. Use `import bnb_patches` and `python -m bnb_patches`. Uninstalling one of the two also removes "
        "files of the other: reinstall that one afterwards"
    )


def _owners() -> list[str]:
    """Return the distributions that claim a top-level ``patches``."""
    with contextlib.suppress(Exception):  # metadata may be broken in any way
        if sys.version_info >= (3, 11):
            return importlib.metadata.packages_distributions().get("patches", [])
        # There it knows only distributions that have a top_level.txt.
        found = importlib.metadata.distributions()
        return [d.metadata["Name"] for d in found if any(str(file) == "patches/__init__.py" for file in d.files or ())]
    return []
