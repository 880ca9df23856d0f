"""``make mutants IDS="ID ..."``: take a piece out of each patch, and see whether the patch's own tests go red.

A copy of the last commit is changed, one place at a time. Of each patch:

- each edit for the installed releases is left out (where there are several);
- each function that the edits name does nothing;
- each condition in such a function (``if``, ``a if b else c``, a comparison that is assigned) is always true;
- the body of each ``if`` in it is left out.

The patch's own tests are the files of tests/repairs that name its id or its module, and ``patches verify``. A patch that
repairs nothing in the installed releases is left out: ``PYTHONPATH=.bnb/0.49.2`` puts another bitsandbytes in. What lives
is printed, and is either a test that is missing or code that nothing needs. ``--sample 5`` takes five at random, and
``--seed`` says which.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from patches.engine import Patch

ROOT = Path(__file__).parents[1]
REPAIRS = "patches/repairs"
PATIENCE = 600


class Mutant(NamedTuple):
    patch: str
    file: str
    what: str
    source: str


def without_an_edit(source: str, patch: Patch) -> Iterator[tuple[str, str]]:
    """What is left out, and the source with the edits of ``patch`` for the installed releases but one."""
    from patches.engine import needs

    for number, part in enumerate(patch.parts):
        here = needs.edits(part)
        for edit in here if len(here) > 1 or part.name else ():
            own = f"PATCH.parts[{number}]" if part.name else "PATCH"
            changed = f"dataclasses.replace({own}, edits=(*{own}.edits[:{(at := part.edits.index(edit))}], *{own}.edits[{at + 1}:]))"
            if part.name:
                changed = f"dataclasses.replace(PATCH, parts=(*PATCH.parts[:{number}], {changed}, *PATCH.parts[{number + 1}:]))"
            find = " ".join(getattr(edit, "find", "").split())
            yield (
                f"{edit.target.rpartition(':')[2]}: without the edit{find and f' of `{find}`'}",
                f"{source}\nimport dataclasses\nPATCH = {changed}\n",
            )


def mutants_of(source: str, names: set[str] | None = None) -> Iterator[tuple[str, str]]:
    """What is changed, and the source with that change, of the functions ``names`` (all that the edits name)."""
    tree = ast.parse(source)
    if names is None:
        names = {node.id for node in named_by(tree) if isinstance(node, ast.Name)}
    for i, node in enumerate(ast.walk(tree)):
        if isinstance(node, ast.FunctionDef) and node.name in names and node in tree.body:
            yield from _in_function(tree, i, node)


def named_by(tree: ast.Module) -> Iterator[ast.expr]:
    """The functions that edits anywhere in ``tree`` name: values of ``names``, ``value`` and ``make``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "names" and isinstance(node.value, ast.Dict):
            values = node.value.values
        elif isinstance(node, ast.keyword) and node.arg in ("value", "make"):
            values = [node.value]
        else:
            continue
        for value in values:
            made = isinstance(value, ast.Call)  # a function that makes it, of functions perhaps
            yield from (
                (inner for inner in ast.walk(value) if isinstance(inner, (ast.Name, ast.Attribute)))
                if made
                else [value]
            )


def _in_function(tree: ast.Module, place: int, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    def changed(at: int) -> tuple[ast.Module, ast.AST]:
        whole = copy.deepcopy(tree)
        return whole, list(ast.walk(list(ast.walk(whole))[place]))[at]

    whole, target = changed(0)
    assert isinstance(target, ast.FunctionDef)
    target.body = [ast.Pass()]
    yield f"line {function.lineno}: {function.name} does nothing", ast.unparse(whole)
    for at, node in enumerate(ast.walk(function)):
        if isinstance(node, (ast.If, ast.IfExp)):
            whole, target = changed(at)
            assert isinstance(target, (ast.If, ast.IfExp))
            target.test = ast.Constant(True)
            yield f"line {node.lineno}: `{ast.unparse(node.test)}` is true", ast.unparse(whole)
            if isinstance(target, ast.If):
                target.body, target.test = [ast.Pass()], copy.deepcopy(node.test)
                yield f"line {node.lineno}: nothing under `if {ast.unparse(node.test)}`", ast.unparse(whole)
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Compare, ast.BoolOp)):
            whole, target = changed(at)
            assert isinstance(target, ast.Assign)
            target.value = ast.Constant(True)
            yield f"line {node.lineno}: `{ast.unparse(node)}` is true", ast.unparse(whole)


def of_patch(patch: Patch, file: Path) -> Iterator[Mutant]:
    """In the file of the patch, and in the functions of other rooms that its edits name."""
    source = file.read_text("utf-8")
    functions = shared_functions(file, ast.parse(source))
    functions[file] = {node.id for node in named_by(ast.parse(source)) if isinstance(node, ast.Name)}
    for where, names in functions_of_edits(patch).items():
        functions.setdefault(where, set()).update(names)
    for what, changed in without_an_edit(source, patch):
        yield Mutant(patch.id, file.relative_to(ROOT).as_posix(), what, changed)
    for where in (file, *(where for where in functions if where != file)):
        for what, changed in mutants_of(where.read_text("utf-8"), functions[where]):
            yield Mutant(patch.id, where.relative_to(ROOT).as_posix(), what, changed)


def functions_of_edits(patch: Patch) -> dict[Path, set[str]]:
    """Return the functions that the edits of ``patch`` name, by the files of the project that have them."""
    found: dict[Path, set[str]] = {}
    for edit in (edit for part in patch.parts for edit in part.edits):
        for function in getattr(edit, "names", {}).values():
            where = Path(sys.modules[function.__module__].__file__ or "") if hasattr(function, "__qualname__") else ROOT
            if where.is_relative_to(ROOT / "patches") and "engine" not in where.parts:
                found.setdefault(where, set()).add(function.__qualname__)
    return found


def shared_functions(file: Path, tree: ast.Module) -> dict[Path, set[str]]:
    """The files of the project whose functions the edits of ``tree`` name, as ``module.function`` or imported by name."""
    modules: dict[str, Path] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                inside = base / f"{alias.name}.py"
                modules[alias.asname or alias.name] = inside if inside.exists() else base.with_suffix(".py")
    found: dict[Path, set[str]] = {}
    for value in named_by(tree):
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            where, name = modules.get(value.value.id), value.attr
        elif isinstance(value, ast.Name):
            where, name = modules.get(value.id), value.id
        else:
            continue
        if where is not None and where.exists() and "engine" not in where.parts:
            found.setdefault(where, set()).add(name)
    return found


def tests_of(patch: str, file: Path) -> list[str]:
    """The test files that are about ``patch``: named like it, or naming it or its module."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    package, _, stem = module.rpartition(".")
    words = (f'"{patch}"', module, f"from {package} import {stem}")
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests" / "repairs").rglob("test_*.py"))
        if path.stem == f"test_{stem}" or any(word in path.read_text("utf-8") for word in words)
    ]


def lives(mutant: Mutant, tests: Sequence[str], copied: Path) -> bool:
    """Whether ``tests`` and ``verify`` say nothing against ``mutant``, in ``copied``, which is as before afterwards."""
    file = copied / mutant.file
    original = file.read_bytes()
    path = [*(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p not in ("", "."))]
    # No bytecode: two mutants of one size, written within a second, would be taken for each other.
    environ = {**os.environ, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
               "PYTHONPATH": os.pathsep.join([str(copied), *path])}  # fmt: skip
    commands = [["patches", "verify", mutant.patch]]
    if tests:
        commands.insert(0, ["pytest", "-q", "-x", "-p", "no:cacheprovider", *tests])
    try:
        file.write_text(mutant.source, "utf-8")
        for command in commands:
            done = subprocess.run([sys.executable, "-m", *command], cwd=copied, env=environ, timeout=PATIENCE,
                                  capture_output=True)  # fmt: skip
            if done.returncode:
                return False
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_bytes(original)
    return True


def copy_of_last_commit(folder: Path) -> None:
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="patches; all, if none is named")
    parser.add_argument("--sample", type=int, default=0, help="this many at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    options = parser.parse_args(argv)
    from patches import REGISTRY
    from patches.engine import catalog

    declared = {patch.id: patch for patch in catalog.patches()}
    files = {id: Path(sys.modules[patch.module].__file__ or "") for id, patch in declared.items()}
    if unknown := sorted(set(options.ids) - files.keys()):
        print(f"unknown patches: {', '.join(unknown)}; python -m patches list has their ids", file=sys.stderr)
        return 2
    for id in [id for id, patch in declared.items() if not REGISTRY.is_for(patch)]:
        if id in options.ids or not options.ids:
            print(f"left out: {id} repairs nothing in the installed releases", file=sys.stderr)
        del files[id]
    chosen = [id for id in options.ids or files if id in files]
    found = [mutant for id in chosen for mutant in of_patch(declared[id], files[id])]
    if options.sample:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    alive = 0
    with tempfile.TemporaryDirectory() as name:
        copied = Path(name)
        if not options.list:
            copy_of_last_commit(copied)
        for mutant in found:
            lived = not options.list and lives(mutant, tests_of(mutant.patch, files[mutant.patch]), copied)
            alive += lived
            print(f"{'LIVES  ' if lived else ''}{mutant.patch} {mutant.file} {mutant.what}", flush=True)
    print(f"{len(found)} mutants, {alive} live")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
