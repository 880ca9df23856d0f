"""A small package of our own to patch: the engine knows nothing of bitsandbytes, nor do its tests."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

from patches.engine.compiler import KeepingCompiler
from patches.engine.edits import Rewrite
from patches.engine.patch import Finding, Patch
from patches.engine.registry import Registry

TOY = '''
from __future__ import annotations

import functools


def plain(x, *, k=1):
    """Adds."""
    y = x + k
    if y > 3:
        y = y * 2
        k = 0
    return y


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@logged
def wrapped(x):
    return x + 1


class Base:
    def who(self):
        return "base"

    @staticmethod
    def static(ctx, a):
        return a - 1

    @classmethod
    def made(cls, a):
        return cls, a

    @property
    def size(self):
        return 1


class Derived(Base):
    def who(self):
        return super().who() + "derived"

    def __mangled(self, x):
        return x

    def use(self):
        return self.__mangled(5)

    class Inner:
        def fail(self, a, b: int = 2):
            sum_ = a + b
            raise ValueError(sum_)


def outer(q):
    def inner(x):
        return x + q

    return inner


closure = outer(10)


def counted(x):
    while True:
        yield x
        x = x + 1
'''


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """The module ``toy``, imported from a file that exists."""
    yield from _imported(tmp_path, monkeypatch, "toy", TOY)


@pytest.fixture
def write_module(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], str]]:
    """Write a module that can then be imported; it is forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> str:
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def _imported(tmp_path, monkeypatch, name: str, source: str) -> Iterator[ModuleType]:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def bytecode_is_written(monkeypatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


@pytest.fixture
def path(tmp_path, bytecode_is_written) -> Path:
    """Where code is kept."""
    return tmp_path / "folder" / "kept"


@pytest.fixture
def registry() -> Callable[..., Registry]:
    """Make a registry of patches named a, b, c, ... with the given edits each."""

    def make(*patches: tuple, **options) -> Registry:
        return Registry(patch(chr(ord("a") + i), *edits, **options) for i, edits in enumerate(patches))

    return make


def patch(name: str, *edits, requires: tuple[str, ...] = ("packaging",), tested_up_to: str = "999", **more) -> Patch:
    return Patch(name, "summary", (), requires, tested_up_to, edits, lambda: Finding(True), **more)


def kept(path: Path, function: FunctionType, *edits: Rewrite) -> CodeType:
    """Make it, write it down, and say what it is."""
    keeping = KeepingCompiler(path)
    made = keeping.rewritten(function, function.__code__, edits)
    keeping.keep()
    return made
