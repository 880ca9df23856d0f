"""``python -m tests.stacks.names``: what our code names in torch and the installed torch has not, as JSON.

Own code and what rewritten code is replaced by. Names that a patch asks for with ``getattr`` or ``hasattr`` are not
counted: those it can do without; nor those of a patch whose ``requires`` leave this torch out.
"""

from __future__ import annotations

import ast
import importlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "patches"


def main() -> None:
    import bitsandbytes  # noqa: F401  # its operators are torch's from then on

    print(json.dumps(missing()))


def missing() -> dict[str, list[str]]:
    """Dotted names that cannot be found, each with the files or patches that name it."""
    found: dict[str, list[str]] = {}
    for where, tree in (*_own(), *_rewritten()):
        for name in named(tree):
            if not is_there(name):
                found.setdefault(name, []).append(where)
    return found


def _own() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if not _is_out_of_range(path):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text("utf-8"))


def _rewritten() -> Iterator[tuple[str, ast.AST]]:
    """What code of others is replaced by, where the patch and the edit are for what is installed."""
    from patches import REGISTRY
    from patches.engine import gate
    from patches.engine.edits import Rewrite

    for patch in REGISTRY.patches.values():
        if REGISTRY.is_for(patch):
            for edit in patch.edits:
                if isinstance(edit, Rewrite) and (not edit.when or gate.satisfied(edit.when)):
                    yield patch.id, ast.parse(textwrap.dedent(edit.replace))


def named(tree: ast.AST) -> set[str]:
    """Chains of attributes that begin with ``torch``, also under another name, and what is imported from it."""
    aliases = dict(_aliases(tree))
    found = set()
    for name in _chains(tree):
        first, dot, rest = name.partition(".")
        found.add(f"{aliases.get(first, first)}{dot}{rest}")
    return {name for name in found if name.partition(".")[0] == "torch"}


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that stand for modules and objects of torch, with what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if (chain := _chain(node.value)).startswith("torch."):
                yield node.targets[0].id, chain
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] == "torch":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)


def _chains(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield _chain(node)


def _chain(node: ast.expr) -> str:
    """The dotted name that ``node`` is, or empty."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_there(name: str) -> bool:
    """Whether the installed packages have ``name``; what stands on an object that is no module or class is not asked."""
    parts = name.split(".")
    owner: object = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        if hasattr(owner, part):
            owner = getattr(owner, part)
            continue
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            return False
    return True


def _is_out_of_range(path: Path) -> bool:
    from patches import REGISTRY
    from patches.engine import gate
    from patches.engine.report import Status

    module = "patches." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    mine = [patch for patch in REGISTRY.patches.values() if patch.module.removeprefix("bnb_") == module]
    return bool(mine) and all(gate.check(p).status is Status.NOT_AFFECTED for patch in mine for p in patch.parts)


if __name__ == "__main__":
    main()
