"""``make release-check``: whether the last commit can be released, on a clean clone of it. A line for each check.

Nothing is written outside of a temporary folder, and nothing is uploaded. Runs where the stack is installed
(``.venv``): the wheel is tried beside it, never in it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from email import message_from_bytes
from pathlib import Path

from tools import stacks
from tools.commands import Failed, expect, run
from tools.release_stack import Stack

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = ("tests/engine", "tests/test_shim.py", "tests/test_layout.py", "tests/test_readme.py")
WITH_TORCH = ("tests/repairs/bitsandbytes/int8/test_copies.py",)
RELATIVE = re.compile(r"\]\((?!https://|#)([^)]+)\)")


class Release:
    """A clean clone of the last commit in ``folder``, and what is built from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / "clone"
        self.dist = folder / "dist"

    @property
    def wheel(self) -> Path:
        return self._only("*.whl")

    @property
    def sdist(self) -> Path:
        return self._only("*.tar.gz")

    def build(self) -> str:
        """The wheel is built from the sdist, as an index gives it."""
        run("git", "clone", "--quiet", ROOT, self.clone)
        python = self._environment("tools", "build", "twine")
        run(python, "-m", "build", "--outdir", self.dist, cwd=self.clone)
        run(python, "-m", "twine", "check", "--strict", self.wheel, self.sdist)
        return f"{self.wheel.name} and {self.sdist.name} pass `twine check --strict`"

    def contents(self) -> str:
        """The wheel brings the package, its types and the shim; its only dependency is packaging."""
        with zipfile.ZipFile(self.wheel) as wheel:
            names = wheel.namelist()
            metadata = message_from_bytes(wheel.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
        tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        expect(tops == {"bnb_patches", "patches", "bnb_patches_autoload.py"}, f"the wheel holds {sorted(tops)}")
        expect({"bnb_patches/py.typed", "patches/py.typed"} <= set(names), "the wheel has no py.typed")
        sources = {str(path.relative_to(self.clone)) for path in (self.clone / "patches").rglob("*.py")}
        expect(sources <= set(names), f"the wheel lacks {sorted(sources - set(names))}")
        hard = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
        expect([re.split(r"\W", text)[0] for text in hard] == ["packaging"], f"the wheel requires {hard}")
        return f"the wheel holds {len(sources)} sources and py.typed, and requires {hard[0]} alone"

    def readme(self) -> str:
        """An index has no files beside the README."""
        relative = RELATIVE.findall((self.clone / "README.md").read_text("utf-8"))
        expect(not relative, f"links and pictures of README.md that an index cannot show: {', '.join(relative)}")
        return "every link and picture of README.md is absolute"

    def installs(self) -> str:
        """Beside each release of bitsandbytes the wheel goes in without a network, and repairs what is imported."""
        stack = Stack(self.folder / "stack")
        count = stack.install(self.wheel)
        said = [stack.repaired(folder) for folder in (None, *sorted((ROOT / ".bnb").glob("[0-9]*")))]
        return f"the wheel moves none of {count} packages; after `import bitsandbytes`: {', '.join(said)}"

    def pins(self) -> str:
        """Beside the releases of each stack of the table, too; the stacks of another Python have a torch of their own."""
        said = []
        for name, pinned in stacks.declared().items():
            if "python" not in pinned:
                stack = Stack(self.folder / stacks.slug(name), stacks.folders(name, pinned))
                stack.install(self.wheel)
                said.append(f"{name}: {stack.repaired()}")
        return f"the wheel moves no package of a stack; after `import bitsandbytes`: {'; '.join(said)}"

    def sources(self) -> str:
        """The sdist runs its own tests: what needs no torch where there is none, and one file that does."""
        with tarfile.open(self.sdist) as archive:
            archive.extractall(self.folder / "sdist", filter="data")
        (unpacked,) = (self.folder / "sdist").iterdir()
        tracked = run(
            "git", "ls-files", "tests", "tools", "benchmarks", "examples", "bnb_patches", "patches", cwd=self.clone
        ).split()
        lost = [name for name in tracked if not (unpacked / name).exists()]
        expect(not lost, f"the sdist lacks {lost}")
        bare = self._environment("bare", "packaging", "pytest", "pytest-timeout")
        first = tests(bare, unpacked, *WITHOUT_TORCH)
        second = tests(Stack(self.folder / "sources").python, unpacked, *WITH_TORCH)
        return f"tests run from the sdist: without torch {first}; with torch {second}"

    def pythons(self) -> str:
        """The engine, and every rewrite from the files of every release, on the other Pythons."""
        if (ROOT / ".bnb").is_dir():  # published files, as they are
            (self.clone / ".bnb").symlink_to(ROOT / ".bnb")
        # What pyenv has installed it puts on the path only if it was chosen.
        chosen = [str(path.parent) for path in Path.home().glob(".pyenv/versions/3.1*/bin/python")]
        path = os.pathsep.join([*chosen, os.environ["PATH"]])
        nox = (sys.executable, "-m", "nox", "--session", "pythons", "wasm")
        said = run(*nox, cwd=self.clone, with_errors=True, PATH=path)
        passed = list(dict.fromkeys(re.findall(r"\* (\S+): success", said)))
        expect(len(passed) >= 4, f"only these ran: {passed}")
        return f"the engine, and every rewrite from the files of every release: {', '.join(passed)}"

    def _only(self, pattern: str) -> Path:
        found = list(self.dist.glob(pattern))
        expect(len(found) == 1, f"{len(found)} files {pattern} were built")
        return found[0]

    def _environment(self, name: str, *packages: str) -> Path:
        """A Python with ``packages`` alone."""
        python = self.folder / name / "bin" / "python"
        run(sys.executable, "-m", "venv", self.folder / name)
        run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *packages)
        return python


def tests(python: Path, folder: Path, *paths: str) -> str:
    """``12 passed``: how pytest ended."""
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, cwd=folder, PYTHONPATH=str(folder))
    return said.strip().splitlines()[-1].strip("= ")


def main(argv: Sequence[str] | None = None) -> int:
    names = ("build", "contents", "readme", "installs", "pins", "sources", "pythons")
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", metavar="CHECK", help=f"some of {', '.join(names)}; build is always one")
    options = parser.parse_args(argv)
    if unknown := set(options.only) - set(names):
        parser.error(f"no check is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if run("git", "status", "--porcelain", cwd=ROOT):
        print("note: what is not committed is not checked")
    with tempfile.TemporaryDirectory(prefix="bnb-patches-release-") as name:
        release = Release(Path(name))
        chosen = [check for check in names if check == "build" or not options.only or check in options.only]
        passed = [_said(check, getattr(release, check)) for check in chosen]
    return 0 if all(passed) else 1


def _said(name: str, check: Callable[[], str]) -> bool:
    """Print how a check ended, in a line."""
    try:
        text, passed = check(), True
    except Failed as failed:
        text, passed = str(failed), False
    print(f"{'ok  ' if passed else 'FAIL'} {name}: {text}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
