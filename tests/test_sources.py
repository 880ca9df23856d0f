"""Every rewrite is made from the files of the installed packages alone: nothing of them is imported, torch least of all.

What this Python's compiler makes of a source differs from one Python to the next, and a patch goes in only where it
makes of the installed file what was imported. So this is what can be run for each Python (`nox -s pythons`).
"""

from __future__ import annotations

import functools
import importlib.machinery
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from patches import REGISTRY
from patches.engine import function_source, gate, match
from patches.engine.edits import Rewrite

TARGETS = sorted(
    {
        edit.target
        for patch in REGISTRY.patches.values()
        for edit in patch.edits
        if isinstance(edit, Rewrite) and edit.reach is None  # else it has no name to find it by
    }
)


@pytest.fixture(autouse=True)
def torch_is_said_to_be_installed(tmp_path, monkeypatch):
    """Where there is none, its metadata: some patches are for certain releases of it."""
    if gate.installed_version("torch"):
        yield
        return
    info = tmp_path / "torch-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    gate._read_version.cache_clear()


@functools.cache
def active() -> dict[str, list[Rewrite]]:
    """By target the rewrites of all patches that are for the installed releases."""
    found: dict[str, list[Rewrite]] = {}
    for patch in REGISTRY.patches.values():
        if REGISTRY.is_for(patch):
            for edit in REGISTRY.edits(patch):
                if isinstance(edit, Rewrite):
                    found.setdefault(edit.target, []).append(edit)
    return found


def file_of(module: str) -> Path | None:
    """The file of ``module``; none of its packages is imported."""
    path = None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    assert spec.origin is not None
    return Path(spec.origin)


def functions(code: types.CodeType, scope: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """The functions in ``code`` with their qualified names."""
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            name = scope + const.co_name
            if const.co_flags & 1:  # CO_OPTIMIZED: a function, not the body of a class
                yield name, const
                name += ".<locals>"
            yield from functions(const, name + ".")


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_made_from_the_file(target):
    edits = active().get(target, [])
    if not edits:
        pytest.skip("none of its patches is for the releases installed here")
    module, _, name = target.partition(":")
    file = file_of(module)
    if file is None:
        pytest.skip(f"there is no file of {module} here")
    compiled = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    code = dict(functions(compiled))[name]  # the last of its name: what stands before are overloads
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = types.FunctionType(code, {"__name__": module}, closure=cells)
    function.__qualname__ = name

    made = match.rewrite(function_source.read_source(function, code), edits)

    assert made != code and made.co_freevars == code.co_freevars
    assert (made.co_name, made.co_firstlineno) == (code.co_name, code.co_firstlineno)
