"""Where what was made is kept, and other processes and threads that read it there."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

import pytest

from patches.engine.compiler import KeepingCompiler
from patches.engine.edits import Rewrite
from tests.engine.conftest import kept

ROOT = Path(__file__).parents[2]
ONE = Rewrite("toy:plain", "y * 2", "y * 3")


def test_who_reads_while_others_write_finds_a_whole_file(toy, path):
    kept(path, toy.plain, ONE)
    done, empty = threading.Event(), []

    def read():
        while not done.is_set():
            if not KeepingCompiler(path)._read():
                empty.append(1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [
        threading.Thread(target=kept, args=(path, toy.plain, Rewrite("toy:plain", "y * 2", f"y * {n}")))
        for n in range(3, 15)
    ]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    for thread in readers:
        thread.join(60)
    assert not empty and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("option", ["", "PYTHONOPTIMIZE", "PYTHONDONTWRITEBYTECODE"])
def test_it_lies_where_python_keeps_our_own_bytecode(fresh, tmp_path, option):
    code = "from patches.engine import compiler as c; print(c.compiler()._path)"
    said = fresh(code, PYTHONPYCACHEPREFIX=str(tmp_path), **({option: "1"} if option else {}))
    place = Path(said.strip())
    assert place.parent == tmp_path.joinpath(*ROOT.parts[1:], "patches", "engine")
    assert place.name.startswith("kept_code.") and place.suffix == ".pyc", "so that pip takes it out"
    assert (".opt-1." in place.name) == (option == "PYTHONOPTIMIZE")


def test_the_module_in_whose_place_it_lies_can_be_imported(fresh, toy, tmp_path, bytecode_is_written):
    """By what looks at all modules of a package. Then that is kept instead, until something is made anew."""
    place = tmp_path.joinpath(*ROOT.parts[1:], "patches", "engine", f"kept_code.{sys.implementation.cache_tag}.pyc")
    kept(place, toy.plain, ONE)
    assert KeepingCompiler(place)._read()
    fresh("from patches.engine import kept_code as k; assert k.__doc__", **writes_below(tmp_path))
    assert KeepingCompiler(place)._read() == {}


def test_a_second_process_reads_no_source(forked, tmp_path):
    """The plugin as users have it, on a package that it repairs."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("what the patches are for cannot be imported without torch")
    code = """
        import sys
        sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False  # a fork reads no variables
        import patches, accelerate.hooks, accelerate.utils.modeling
        from patches.engine import function_source
        done = patches.apply().with_status(patches.Status.APPLIED)
        print(len(done), len(function_source._sources))
        print([change.diff.count(chr(10)) for result in done for change in result.changes])
        patches.revert()
    """
    first, second = (forked(code, str(tmp_path)).splitlines() for _ in range(2))
    applied, read = map(int, first[0].split())
    assert applied and read, "nothing was kept yet"
    assert second[0] == f"{applied} 0" and first[1] == second[1]


def writes_below(folder: Path) -> dict[str, str]:
    """Variables of a process that keeps its bytecode there, whatever this one does."""
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
