"""What the layout promises to a reader, kept by looking at every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "patches"
LIBRARIES = {
    "accelerate",
    "axolotl",
    "bitsandbytes",
    "llamafactory",
    "peft",
    "torch",
    "torchao",
    "transformers",
    "trl",
    "unsloth",
}
PATCH_FILES = sorted(
    path for path in PACKAGE.glob("repairs/*/**/*.py")
    if path.name != "__init__.py" and "helpers" not in path.relative_to(PACKAGE).parts
)  # fmt: skip


def imported(path: Path, at_import: bool = False) -> Iterator[str]:
    """The modules that a file of ours imports, written absolutely; ``at_import``: when it is imported itself."""
    tree = ast.parse(path.read_text())
    package = path.parent.relative_to(ROOT).parts
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *filter(None, [node.module])))


def named(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(PACKAGE))) for path in paths]


@pytest.mark.parametrize("path", named(PATCH_FILES))
def test_a_patch_imports_the_engine_and_helpers_only(path):
    ours = {name for name in imported(path) if name.split(".")[0] == "patches"}
    assert all(name.startswith(("patches.engine", "patches.repairs.helpers")) for name in ours), ours
    early = {name.split(".")[0] for name in imported(path, at_import=True)}
    assert not early & {*LIBRARIES, "torch"}, "imported by whoever imports the plugin"


def test_there_are_patch_files():
    assert len(PATCH_FILES) > 40


@pytest.mark.parametrize("path", named(sorted(PACKAGE.glob("engine/*.py"))))
def test_the_engine_knows_no_library(path):
    assert not {name.split(".")[0] for name in imported(path)} & {*LIBRARIES, "torch"}


def test_no_file_is_longer_than_300_lines():
    files = [
        path
        for folder in ("bnb_patches", "patches", "tests", "benchmarks", "tools", "examples")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    long = {str(path.relative_to(ROOT)): lines for path in files if (lines := path.read_text().count("\n")) > 300}
    assert not long
