"""What was made of a function once is used again, in other processes too: for that very function, or not at all."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from patches.engine import compiler, function_source, match
from patches.engine.compiler import Compiler, KeepingCompiler
from patches.engine.edits import Rewrite
from patches.engine.function_source import Conflict
from tests.engine.conftest import kept

ONE = Rewrite("toy:plain", "y * 2", "y * 3")
OTHER = Rewrite("toy:plain", "y * 2", "y * 4")


@pytest.fixture
def no_source(monkeypatch):
    """From now on, nothing reads the source of a function."""

    def refuse():
        monkeypatch.setattr(function_source, "read_source", lambda function, code: pytest.fail("the source was read"))

    return refuse


def test_what_was_kept_is_what_the_source_gives_to_the_last_column(toy, path, no_source):
    method = toy.Derived.who
    with_super = Rewrite("toy:Derived.who", "'derived'", "'DERIVED'")
    made = kept(path, toy.plain, ONE), kept(path, method, with_super)
    assert path.exists()
    no_source()
    again = KeepingCompiler(path)
    for function, edit, first in ((toy.plain, ONE, made[0]), (method, with_super, made[1])):
        code = again.rewritten(function, function.__code__, [edit])
        assert code is not first and code == first
        assert list(code.co_positions() if hasattr(code, "co_positions") else code.co_lines()) == list(
            first.co_positions() if hasattr(first, "co_positions") else first.co_lines()
        )
        assert (code.co_filename, code.co_freevars, code.co_flags) == (
            first.co_filename,
            first.co_freevars,
            first.co_flags,
        )


def test_whether_a_text_stands_in_a_function_is_kept_too(toy, path, no_source):
    keeping = KeepingCompiler(path)
    assert keeping.holds(toy.plain, toy.plain.__code__, "y * 2") and not keeping.holds(
        toy.plain, toy.plain.__code__, "y * 9"
    )
    keeping.keep()
    no_source()
    again = KeepingCompiler(path)
    assert (
        again.holds(toy.plain, toy.plain.__code__, "y * 2") is True
        and again.holds(toy.plain, toy.plain.__code__, "y * 9") is False
    )


def test_another_edit_another_function_or_another_count_is_made_from_the_source(toy, path):
    kept(path, toy.plain, ONE)
    keeping = KeepingCompiler(path)
    assert keeping.rewritten(toy.plain, toy.plain.__code__, [OTHER]) == Compiler().rewritten(
        toy.plain, toy.plain.__code__, [OTHER]
    )
    with pytest.raises(Conflict, match="expected 2"):
        keeping.rewritten(toy.plain, toy.plain.__code__, [ONE._replace(count=2)])
    with pytest.raises(Conflict):
        keeping.rewritten(toy.counted, toy.counted.__code__, [ONE])


def test_a_file_that_changed_since_decides_as_if_nothing_were_kept(toy, path):
    kept(path, toy.plain, ONE)
    file = Path(toy.__file__)
    file.write_text(file.read_text().replace("y * 2", "y + 2"))  # of the same size
    os.utime(file, ns=(1, 1))
    function_source.forget_sources()
    with pytest.raises(Conflict, match="the file changed after the import"):
        KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE])
    file.unlink()
    function_source.forget_sources()
    with pytest.raises(Conflict, match="no source"):
        KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE])


def test_a_function_that_someone_else_has_put_there_is_not_taken_for_the_one_it_was_made_from(toy, path):
    kept(path, toy.plain, ONE)
    lines = "\n" * (toy.plain.__code__.co_firstlineno - 1)
    space: dict = {}
    exec(compile(f"{lines}def plain(x, *, k=1):\n    return x", toy.__file__, "exec"), space)
    toy.plain.__code__ = space["plain"].__code__
    with pytest.raises(Conflict, match="another program replaced"):
        KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE])


@pytest.fixture
def reads(monkeypatch) -> list:
    """What source was read."""
    found, real = [], function_source.read_source
    monkeypatch.setattr(
        function_source, "read_source", lambda function, code: found.append(function) or real(function, code)
    )
    return found


@pytest.mark.parametrize("kind", range(4), ids=["python", "compiler", "locate", "match"])
def test_another_engine_or_another_python_finds_nothing(toy, path, monkeypatch, reads, kind):
    made = kept(path, toy.plain, ONE)
    assert KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE]) == made and len(reads) == 1
    other = list(compiler._ENGINE)
    other[kind] = b"another"
    monkeypatch.setattr(compiler, "_ENGINE", tuple(other))
    assert KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE]) == made and len(reads) == 2


@pytest.mark.parametrize("module", [compiler, function_source, match])
def test_an_engine_is_another_when_one_of_its_files_is(module, tmp_path, monkeypatch):
    before = compiler._engine()
    copy = tmp_path / "engine.py"
    copy.write_text(Path(module.__file__).read_text() + "\n")
    monkeypatch.setattr(module, "__file__", str(copy))
    assert None not in (before, compiler._engine()) and compiler._engine() != before
    assert importlib.util.MAGIC_NUMBER in before
    monkeypatch.delattr(module, "__file__")
    assert compiler._engine() is None, "from no file"


def test_what_an_upgrade_has_replaced_meanwhile_is_not_what_wrote_it(toy, path, monkeypatch, tmp_path):
    """pip puts other files where this process has its engine from."""
    copy = tmp_path / "match.py"
    copy.write_text("")
    monkeypatch.setattr(match, "__file__", str(copy))
    kept(path, toy.plain, ONE)
    monkeypatch.setattr(compiler, "_ENGINE", compiler._engine())  # of a process that begins now
    assert not KeepingCompiler(path)._read()


def test_an_engine_from_no_file_writes_nothing(toy, path, monkeypatch):
    monkeypatch.setattr(compiler, "_ENGINE", None)
    kept(path, toy.plain, ONE)
    assert not path.parent.exists()


def test_two_edits_with_one_replacement_are_told_apart(path, write_module, reads):
    module = importlib.import_module(write_module("pair", "def h(x):\n    return x + 1, x + 2\n"))
    first, second = (Rewrite("pair:h", f"x + {n}", "x") for n in (1, 2))
    assert kept(path, module.h, first) != kept(path, module.h, second) and len(reads) == 2
    keeping, code = KeepingCompiler(path), module.h.__code__
    assert keeping.rewritten(module.h, code, [first]) != keeping.rewritten(module.h, code, [second])
    assert len(reads) == 2
    assert {key[:3] for key in keeping._read()} == {(module.__file__, "h", code.co_firstlineno)}


@pytest.mark.parametrize("change", [{"text": " "}, {"time": 10}], ids=["size", "time"])
def test_a_file_of_another_size_or_time_is_read(toy, path, reads, change):
    file = Path(toy.__file__)
    before = file.stat()
    kept(path, toy.plain, ONE)
    file.write_text(file.read_text() + change.get("text", ""))
    time = int(before.st_mtime) + change.get("time", 0)
    os.utime(file, (time, time))
    KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE])
    assert len(reads) == 2


def test_an_image_of_a_container_keeps_whole_seconds_and_that_is_enough(toy, path, reads):
    kept(path, toy.plain, ONE)
    seconds = int(Path(toy.__file__).stat().st_mtime)
    os.utime(toy.__file__, (seconds, seconds))
    KeepingCompiler(path).rewritten(toy.plain, toy.plain.__code__, [ONE])
    assert len(reads) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        lambda data: b"\0" * len(data),
        lambda data: data + b"\0",
    ],
    ids=["empty", "half", "one bit", "zeros", "longer"],
)
def test_a_damaged_file_is_as_none(toy, path, spoil):
    made = kept(path, toy.plain, ONE)
    path.write_bytes(spoil(path.read_bytes()))
    keeping = KeepingCompiler(path)
    assert keeping.rewritten(toy.plain, toy.plain.__code__, [ONE]) == made
    keeping.keep()
    assert KeepingCompiler(path)._read(), "and is written anew"
