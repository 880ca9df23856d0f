"""Compiled graphs that another process left on disk: one without the plugin, and one with an older plugin.

torch finds a graph again by its operators and their arguments, and knows nothing of the code behind an operator.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from tests import forks, processor
from tests.releases import selected

from .aot_worker import KINDS
from .checks import Check
from .known import marks
from .rule import Trace, fault

WORKER = Path(__file__).with_name("aot_worker.py")


def train(cache: Path, kinds: list[str], root: Path | None = None) -> dict[str, Trace]:
    """What :mod:`.aot_worker` got, by the kind of layer."""
    out = cache.with_suffix(".json")
    out.unlink(missing_ok=True)
    path = os.pathsep.join([*os.environ["PYTHONPATH"].split(os.pathsep), str(processor.ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "0"}
    arguments = [str(WORKER), str(cache), str(out), ",".join(kinds), *([str(root)] if root else [])]
    (done,) = forks.run(forks.Program(arguments, env), timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    shown = json.loads(out.read_text())
    return {kind: Trace(tuple(Check(right, figure) for right, figure in shown[kind])) for kind in kinds}


def older_plugin(folder: Path) -> Path:
    """A copy of the plugin whose operators compute three times what they should, and nothing else."""
    for name in ("bnb_patches", "patches"):
        shutil.copytree(processor.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (folder / "patches/operators").glob("[!_]*.py"):
        if "import define_operator" not in file.read_text():
            continue
        tree = ast.parse(file.read_text())
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    node.value = ast.Call(ast.Name("_tripled", ast.Load()), [node.value], [])
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)) + TRIPLED)
    return folder


TRIPLED = """

def _tripled(result):
    if isinstance(result, torch.Tensor) and result.is_floating_point():
        return result * 3
    if type(result) is tuple and any(isinstance(each, torch.Tensor) for each in result):
        return tuple(_tripled(each) for each in result)
    return result
"""


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> list[str]:
    return selected(request, "kind")


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> tuple[Path, dict[str, Trace]]:
    """A cache that a process without the plugin has filled, and what that process got."""
    cache = tmp_path_factory.mktemp("aot") / "unpatched"
    return cache, train(cache, kinds)


@pytest.fixture(scope="module")
def after_unpatched(unpatched: tuple[Path, dict[str, Trace]], kinds: list[str]) -> dict[str, Trace]:
    return train(unpatched[0], kinds, processor.ROOT)


@pytest.fixture(scope="module")
def after_older(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("older")
    older = train(folder / "cache", kinds, older_plugin(folder))
    assert not any(check.right for trace in older.values() for check in trace.checks), "it is another plugin"
    assert list((folder / "cache").glob("aotautograd/*")), "its graphs are on disk"
    return train(folder / "cache", kinds, processor.ROOT)


def _kinds(name: str) -> list[object]:
    other = [pytest.mark.release("4 bits; tests/operators/test_code_digest.py has the operator of INT8")]
    return [
        pytest.param(kind, marks=[*marks(f"{name}[{kind}]"), *(other if kind != KINDS[0] else ())]) for kind in KINDS
    ]


@pytest.mark.parametrize("kind", _kinds("aot_cache.after_unpatched"))
def test_after_a_process_without_the_plugin(kind, unpatched, after_unpatched):
    assert not fault(unpatched[1][kind], after_unpatched[kind])


@pytest.mark.release("tests/operators/test_code_digest.py: a version of the plugin does not take the graphs of another")
@pytest.mark.parametrize("kind", _kinds("aot_cache.after_older"))
def test_after_a_process_with_an_older_plugin(kind, unpatched, after_older):
    assert not fault(unpatched[1][kind], after_older[kind])
