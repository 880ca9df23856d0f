"""When what was made is written, and what a process that is interrupted there leaves."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

import pytest

from patches.engine import compiler
from patches.engine.build import Builder
from patches.engine.compiler import Compiler, KeepingCompiler
from patches.engine.edits import Rewrite, SetAttribute
from patches.engine.registry import Registry
from patches.engine.report import Status
from tests.engine.conftest import kept, patch

ONE = Rewrite("toy:plain", "y * 2", "y * 3")
OTHER = Rewrite("toy:plain", "y * 2", "y * 4")


def test_a_folder_that_cannot_be_written_is_no_error(toy, tmp_path, bytecode_is_written):
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file" / "kept", toy.plain, ONE)


def test_nothing_is_written_where_python_writes_no_bytecode(toy, path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept(path, toy.plain, ONE)
    assert not path.parent.exists()


def test_nothing_is_written_where_there_is_nothing_new(toy, path):
    kept(path, toy.plain, ONE)
    before = path.stat()
    kept(path, toy.plain, ONE)
    assert path.stat().st_ino == before.st_ino and os.listdir(path.parent) == [path.name]
    keeping = KeepingCompiler(path)
    keeping.rewritten(toy.plain, toy.plain.__code__, [OTHER])
    keeping.keep()
    written = path.stat().st_ino
    keeping.keep()
    assert written != before.st_ino and path.stat().st_ino == written


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])  # the last from an audit hook
def test_what_cannot_be_written_whole_is_not_written(toy, path, monkeypatch, error):
    kept(path, toy.plain, ONE)
    before = path.read_bytes()

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else contextlib.nullcontext():
        kept(path, toy.plain, OTHER)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_what_was_made_from_other_files_is_kept_until_they_change(toy, path, write_module):
    second = importlib.import_module(write_module("second", "def f(x):\n    return x + 1\n"))
    edit = Rewrite("second:f", "x + 1", "x + 2")
    kept(path, second.f, edit)
    kept(path, toy.plain, ONE)
    assert len(KeepingCompiler(path)._read()) == 2
    Path(second.__file__).write_text("")
    kept(path, toy.plain, OTHER)
    assert {key[0] for key in KeepingCompiler(path)._read()} == {toy.__file__}


def test_it_does_not_grow_without_end(toy, path, monkeypatch):
    monkeypatch.setattr(compiler, "_MAX_ENTRIES", 2)
    for factor in range(3, 8):
        kept(path, toy.plain, Rewrite("toy:plain", "y * 2", f"y * {factor}"))
    assert [key[3][0][1] for key in KeepingCompiler(path)._read()] == ["y * 6", "y * 7"], "the newest"


def test_a_registry_keeps_what_all_patches_make_and_nothing_of_a_few(toy, path):
    def registry():
        return Registry([patch("a", ONE), patch("b", SetAttribute("toy:Base.who", original_contains="'base'", make=lambda old: old))],
                        builder=Builder(KeepingCompiler(path)))  # fmt: skip

    one = registry()
    one.apply("a")
    one.revert()
    assert not path.exists()
    for verb in ("apply", "prepare"):
        r = registry()
        getattr(r, verb)()
        r.revert()
        assert len(KeepingCompiler(path)._read()) == 2
        path.unlink()


def test_what_an_import_brings_is_kept(path, write_module):
    write_module("late", "def f(x):\n    return x + 1\n")
    edit = Rewrite("late:f", "x + 1", "x + 2")
    r = Registry([patch("a", edit)], builder=Builder(KeepingCompiler(path)))
    r.follow_imports()
    assert not path.exists() and r.report()["a"].status is Status.PENDING
    late = importlib.import_module("late")
    assert late.f(1) == 3 and len(KeepingCompiler(path)._read()) == 1
    r.revert()


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such bits")
def test_whoever_may_read_our_files_may_read_it(toy, path):
    before = os.umask(0o022)
    try:
        kept(path, toy.plain, ONE)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == Path(compiler.__file__).stat().st_mode & 0o644 | 0o200


def test_a_python_that_keeps_no_bytecode_keeps_no_code(monkeypatch):
    monkeypatch.setattr(sys.implementation, "cache_tag", None)
    assert type(compiler.compiler()) is Compiler
