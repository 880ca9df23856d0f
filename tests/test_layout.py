"""What the layout promises to a reader, kept by looking at every file."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "patches"
LIBRARIES = {
    "accelerate",
    "axolotl",
    "bitsandbytes",
    "diffusers",
    "llamafactory",
    "peft",
    "torch",
    "torchao",
    "transformers",
    "trl",
}
LOWER = tuple(f"patches.{room}" for room in (
    "adapters", "config", "distributed", "engine", "experts", "loading", "offload", "operators", "optimizers", "process",
    "quantized", "repairs.reproducers",
))  # fmt: skip
PATCH_FILES = sorted(
    path for path in PACKAGE.glob("repairs/*/**/*.py")
    if path.name != "__init__.py" and "reproducers" not in path.relative_to(PACKAGE).parts
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
def test_a_patch_imports_the_engine_and_lower_rooms_only(path):
    ours = {name for name in imported(path) if name.split(".")[0] == "patches"}
    assert all(name.startswith(LOWER) for name in ours), ours
    early = {name.split(".")[0] for name in imported(path, at_import=True)}
    assert not early & {*LIBRARIES, "torch"}, "imported by whoever imports the plugin"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive has no list of what is kept in the repository")
def test_nothing_that_a_program_left_is_kept_in_the_repository():
    """An offloaded model leaves folders of weights where it runs; such files were added to the repository once."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]  # whoever made the checkout
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kept = {path.partition("/")[0] for path in listed.split("\0") if path}
    folders = {name for name in kept if (ROOT / name).is_dir()}
    assert folders == {".ci", ".github", "benchmarks", "bnb_patches", "docs", "examples", "patches", "tests", "tools"}
    assert ".safetensors" not in {Path(path).suffix for path in listed.split("\0")}


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


STATE = {"SCB", "CB", "quant_state", "bnb_quantized"}
OWNERS = {f"quantized/{name}.py" for name in
          ("four_bit/quant_states", "int8/weight_moves", "int8/plain_weights", "int8/row_scales",
           "int8/scale_ownership")}  # fmt: skip
LOOKUPS = {"getattr", "setattr", "hasattr", "delattr", "get", "pop", "setdefault"}


def asked_for(path: Path) -> Iterator[str]:
    """Where the code of ``path`` asks for the state of a quantized layer itself; ``defect()`` is a user's program."""
    tree = ast.parse(path.read_text())
    reproducers = (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name.startswith("defect"))
    theirs = {id(node) for function in reproducers for node in ast.walk(function)}
    return (f"line {line}: {what}" for node in ast.walk(tree) if id(node) not in theirs for line, what in reads(node))


def reads(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name, if ``node`` asks for a piece of the state: as an attribute, by a look-up, in ``vars()``."""
    if isinstance(node, ast.Attribute) and node.attr in STATE:
        yield node.lineno, f".{node.attr}"
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        names = {one.value for one in node.args if isinstance(one, ast.Constant)} if called in LOOKUPS else set()
        yield from ((node.lineno, f".{name}") for name in names & STATE)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in STATE:
        if ast.unparse(node.value).startswith("vars(") or ast.unparse(node.value).endswith(".__dict__"):
            yield node.lineno, f".{node.slice.value}"


@pytest.mark.parametrize("path", named(sorted(PACKAGE.glob("**/*.py"))))
def test_only_its_owners_ask_for_the_state_of_a_quantized_layer(path):
    """One owner for each truth (docs/state.md): a patch that asks for itself believes a place that is not the owner."""
    if str(path.relative_to(PACKAGE)) in OWNERS:
        assert list(asked_for(path)), "no owner any more: take it off the list"
    else:
        assert not list(asked_for(path))


IN_EDITS = {
    ("bitsandbytes-int8-plain-weight", ".CB"): "forward asks whether the weight is a plain tensor, before it asks for more",
    ("bitsandbytes-linear4bit-plain-weight", ".quant_state"): "the same, of 4-bit layers",
    ("bitsandbytes-params4bit-meta", ".quant_state"): "the weight hands its own state to the helper that reads the devices in it",
    ("accelerate-int8-offload-resident-weights", ".CB"): "written, not read: the hook gives up the codes that it brought",
    ("weight_moves", ".SCB"): "an edit of an owner, which many patches share",
}  # fmt: skip
"""Pieces of state that an edit asks for and the expression that it replaces does not, each with its reason."""


def test_edits_ask_for_no_more_of_the_state_than_what_they_replace():
    """Code in an edit is text, which ``asked_for`` does not see. Most of it repeats the library's own expression."""
    pytest.importorskip("packaging")
    from patches import REGISTRY
    from patches.engine import Rewrite
    from patches.quantized.int8.weight_moves import KEEP_PACKED_WEIGHT

    shared = {edit.replace for edit in KEEP_PACKED_WEIGHT if isinstance(edit, Rewrite)}
    found = set()
    for patch in REGISTRY.patches.values():
        for edit in patch.edits:
            if isinstance(edit, Rewrite):
                owner = "weight_moves" if edit.replace in shared else patch.id
                found |= {(owner, name) for name in _asked_in(edit.replace) - _asked_in(edit.find)}
    assert found == IN_EDITS.keys()


def _asked_in(code: str) -> Counter[str]:
    tree = ast.parse(textwrap.dedent(code).strip())
    return Counter(what for node in ast.walk(tree) for _, what in reads(node))
