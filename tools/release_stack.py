"""An environment with the stack of this one and without this plugin: to install a wheel into, and see what it does."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tools.commands import expect, run

VERSIONS = """
import importlib.metadata, json
found = {}
for d in importlib.metadata.distributions():  # of two the first on the path counts
    found.setdefault(d.name.lower().replace("_", "-"), d.version)
print(json.dumps(found))
"""
REPAIRED = """
import sys, bitsandbytes, patches
from patches import Status
report = patches.report()
assert patches.__file__.startswith(sys.prefix), patches.__file__
bad = report.with_status(Status.CONFLICT, Status.FAILED)
assert not bad, [f"{r.id}: {r.status}: {r.reason}" for r in bad]
count = len(report.with_status(Status.APPLIED))
assert count, str(report)
print(f"{count} patches in {bitsandbytes.__version__}")
"""


class Stack:
    """What is installed beside the running interpreter but for this plugin, as links, in an environment of its own.

    What lies in the folders ``first`` comes before it.
    """

    def __init__(self, folder: Path, first: Sequence[Path] = ()) -> None:
        self.python = folder / "bin" / "python"
        links = folder / "links"
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        links.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if "bnb_patches" not in entry.name:
                (links / entry.name).symlink_to(entry)
        (site,) = folder.glob("[Ll]ib/**/site-packages")
        (site / "stack.pth").write_text("".join(f"{path}\n" for path in (*first, links)))

    def versions(self) -> dict[str, str]:
        """Every distribution that a program here would find."""
        found: dict[str, str] = json.loads(self._run("-c", VERSIONS))
        return found

    def install(self, wheel: Path) -> int:
        """Install it without an index, for what the stack lacks cannot be had; return how many packages there are, all unmoved."""
        before = self.versions()
        self._run("-m", "pip", "install", "--quiet", "--no-index", wheel)
        moved = {name for name, _ in self.versions().items() ^ before.items()} - {"bnb-patches"}
        expect(not moved, f"installing the wheel moved {sorted(moved)}")
        return len(before)

    def repaired(self, bitsandbytes: Path | None = None) -> str:
        """How many patches ``import bitsandbytes`` puts in, with the release in that folder first on the path."""
        return self._run("-c", REPAIRED, PYTHONPATH=str(bitsandbytes or "")).splitlines()[-1]

    def _run(self, *arguments: str | Path, **environ: str) -> str:
        return run(self.python, *arguments, cwd=self.python.parent, with_errors=False, **environ)
