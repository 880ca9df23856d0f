"""Import hooks of wrapt beside ours."""

from __future__ import annotations

import importlib
import sys

import pytest

from patches.engine import imports
from patches.engine.edits import Rewrite
from patches.engine.report import Status
from tests.engine.wrappers import Counter

wrapt = pytest.importorskip("wrapt", reason="the wrappers are wrapt's")

BODY = "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self):\n        return 1\n"


@pytest.fixture
def finders(monkeypatch):
    """The finders as they are without wrapt's, which it adds once in a process; afterwards as they were."""
    before = list(sys.meta_path)
    monkeypatch.setattr(wrapt.importer, "_post_import_hooks_init", False)
    sys.meta_path[:] = [finder for finder in before if not isinstance(finder, wrapt.importer.ImportHookFinder)]
    yield
    sys.meta_path[:] = before


@pytest.mark.parametrize("front", ["theirs", "ours"])
@pytest.mark.parametrize("register", ["when_imported", "register_post_import_hook", "wrap_function_wrapper"])
@pytest.mark.parametrize("ours_first", [False, True], ids=["theirs, ours", "ours, theirs"])
@pytest.mark.parametrize("name", ["traced", "traced.sub"])
def test_import_hooks_of_both_run_once_in_either_order(
    write_module, registry, finders, name, ours_first, register, front
):
    """An instrumentation registers before or after us, and either finder may be asked first."""
    name = f"{name.replace('traced', f'traced_{register}_{front}_{ours_first}')}"
    package = name.partition(".")[0]
    if "." in name:
        write_module(f"{package}.__init__", f"from . import sub\n{BODY}")
    write_module(name, BODY)
    r = registry((Rewrite(f"{name}:f", "x + 1", "x + 2"), Rewrite(f"{name}:A.g", "1", "2")))
    counter, told = Counter(), []

    def hook(module):
        told.append(module.__name__)
        for path in ("f", "A.g"):
            wrapt.wrap_function_wrapper(module, path, counter)

    def theirs():
        if register == "wrap_function_wrapper":  # wrapt's own lazy form
            told.append(name)
            for path in ("f", "A.g"):
                wrapt.wrap_function_wrapper(f"{name}?", path, counter)
        else:
            wrapt.when_imported(name)(hook) if register == "when_imported" else wrapt.register_post_import_hook(
                hook, name
            )

    steps = [r.apply, theirs] if ours_first else [theirs, r.apply]
    for step in steps:
        step()
    kind = {"ours": imports._Finder, "theirs": wrapt.importer.ImportHookFinder}[front]
    sys.meta_path.sort(key=lambda finder: not isinstance(finder, kind))
    module = importlib.import_module(name)
    assert told == [name]
    assert module.f(1) == 3 and module.A().g() == 2 and counter.calls == 2
    assert type(module.f) is wrapt.FunctionWrapper and r.report()["a"].status is Status.APPLIED
    r.revert()
    assert module.f(1) == 2 and module.A().g() == 1 and counter.calls == 4
