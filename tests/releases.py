"""What of the suite a release of bitsandbytes can change.

On the newest release everything runs. Of an older one only what its source can change: a patch is tested there if
a function that it edits is written otherwise than on every newer release that the suite meets. All of this is read
from the installed files; nothing of bitsandbytes is imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from patches import REGISTRY
from patches.engine import gate, requirement
from patches.engine.edits import Edit, Rewrite, module_of

Test = TypeVar("Test", bound=Callable[..., object])
ROOT = Path(__file__).parents[1]
SHORT = ("0.46.1", "0.48.2", "0.49.2", "0.50.2")
"""The releases that `make check` meets, oldest first: the first, the last, and the last of the two series between."""
ALWAYS = (
    "tests/test_contract.py",
    "tests/test_sources.py",
    "tests/harm/test_catalogue.py",
    "tests/harm/matrix/test_matrix.py",
    "tests/programs/test_stack.py",
)
"""What every release runs: each reproducer of a defect of bitsandbytes, each rewrite, a sixth of the catalogue of harm and
of the slice of the matrix, and one natural flow.

The catalogue on a processor with AVX512-BF16 (``tests/harm/test_packed.py``) is run on the newest. On an older one the
reproducers are run on such a processor, and the tests of the patches whose source differs there.
"""


def is_newest() -> bool:
    """Whether the newest release is installed, or one that is newer."""
    return gate.satisfied(f"bitsandbytes>={SHORT[-1]}")


def is_daily(config: pytest.Config) -> bool:
    """Whether this run leaves what is marked ``release`` to `make test-all`."""
    return "not release" in config.getoption("markexpr")


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """What this run selects of the parameter ``name`` in the file of tests that asks: what is launched for all at once."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params[name] for item in items if name in item.callspec.params))


def of_the_newest(test: Test) -> Test:
    """A decorator: on an older release the test is left to `make test-all`."""
    return test if is_newest() else pytest.mark.release("the same on the newest release")(test)


def installed(release: str) -> bool:
    """Whether the files of ``release`` lie in ``.bnb``."""
    return (ROOT / ".bnb" / release / "bitsandbytes").is_dir()


@functools.cache
def digest(patch_id: str, release: str) -> str | None:
    """Of the source that the patch edits in bitsandbytes ``release``; None where it is not for that release.

    The same for all releases if it edits nothing in bitsandbytes.
    """
    patch = REGISTRY.patches[patch_id]
    if not all(_fits(text, release) for text in patch.requires):
        return None
    edits = [edit for edit in patch.edits if all(_fits(text, release) for text in edit.when.split(" and ") if text)]
    sources = [source(edit, ROOT / ".bnb" / release) for edit in edits if module_of(edit).startswith("bitsandbytes")]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def alike(patch_id: str, release: str) -> tuple[str, ...]:
    """The releases of :data:`SHORT` on which the patch edits the same source as on ``release``, oldest first."""
    return tuple(other for other in SHORT if digest(patch_id, other) == digest(patch_id, release))


def is_tested(patch_id: str, release: str) -> bool:
    """Whether ``release`` is the newest on which the patch edits this source, so that its tests run there.

    Of a release that is none of :data:`SHORT`, whether the patch edits on none of these the same source.
    """
    return digest(patch_id, release) is not None and (alike(patch_id, release) or (release,))[-1] == release


def files(release: str) -> list[str]:
    """What pytest is to run with an older ``release``, relative to the checkout."""
    repairs = sorted(ROOT.glob("tests/repairs/*/**/test_*.py"))  # above the libraries: helpers, which are our own
    chosen = [path for path in repairs if any(is_tested(patch_id, release) for patch_id in patches_of(path))]
    return [*ALWAYS, *(str(path.relative_to(ROOT)) for path in chosen)]


def patches_of(path: Path) -> list[str]:
    """The ids of the patches that a file of tests is about: the one whose name it has, else those that it names."""
    package, *folder = path.parent.relative_to(ROOT / "tests" / "repairs").parts
    parts = [package, *folder, path.stem.removeprefix("test_")]
    own = {"-".join(each).replace("_", "-") for each in (parts, [package, parts[-1]])} & REGISTRY.patches.keys()
    named = set(re.findall(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+", path.read_text())) & REGISTRY.patches.keys()
    return sorted(own or named)


def _fits(text: str, release: str) -> bool:
    needed = requirement.parse(text)
    return needed.name != "bitsandbytes" or needed.contains(release)


def source(edit: Edit, folder: Path) -> str:
    """What ``edit`` stands in: the function; the class, of an attribute that is new; else the module.

    ``folder`` holds the package; where it does not, the answer is that of an empty file.
    """
    module, _, name = edit.target.partition(":")
    node: ast.AST = _tree(module, folder)
    if isinstance(edit, Rewrite) and edit.reach is not None:
        return ast.dump(node)
    for part in name.split("."):
        found = [each for each in getattr(node, "body", []) if getattr(each, "name", None) == part]
        if not found:
            break
        node = found[-1]  # what stands before are overloads
    return ast.dump(node)


@functools.cache
def _tree(module: str, folder: Path) -> ast.Module:
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text() if file.exists() else "")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]  # words change nothing
    return tree
