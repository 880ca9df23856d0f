"""Writing the file of adopted patches: whole or as it was, whoever writes or reads at the same time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from patches.newer_releases import adopted

POSIX = pytest.mark.skipif(os.name != "posix", reason="there are no POSIX files")
LOCKS = pytest.mark.skipif(importlib.util.find_spec("fcntl") is None, reason="files cannot be locked here")
ROUNDS = 20

ADD = """
import sys
from patches.newer_releases import adopted
for number in range(int(sys.argv[2])):
    adopted.add_entries([adopted.Entry(f"{sys.argv[1]}-{number}", {"peft": "1"}, "0123" * 8, "2026-11-27")])
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "folder" / "own.json"
    monkeypatch.setenv(adopted.VARIABLE, str(path))
    return path


def entry(patch: str = "a", sources: str = "s", **versions: str) -> adopted.Entry:
    return adopted.Entry(patch, versions or {"peft": "1"}, sources, "2026-11-27")


def names(path: Path) -> list[str]:
    return [each.patch for each in adopted.read_entries(path)]


def beside(path: Path) -> set[str]:
    return {each.name for each in path.parent.iterdir()} - {path.name, f"{path.name}.lock"}


def test_what_was_verified_again_takes_the_place_of_what_was_known(file):
    adopted.add_entries([entry(), entry(peft="2"), entry("b")])
    adopted.add_entries([entry(sources="t")])
    assert adopted.read_entries(file) == [entry(peft="2"), entry("b"), entry(sources="t")]
    assert not beside(file)


def test_it_does_not_grow_for_ever(file, monkeypatch):
    monkeypatch.setattr(adopted, "_MAX_ENTRIES", 5)
    for number in range(7):
        adopted.add_entries([entry(str(number))])
    assert names(file) == ["2", "3", "4", "5", "6"]


def test_to_forget_names_patches_or_all_and_says_how_many(file):
    assert adopted.forget_entries(()) == 0 and not file.exists()
    adopted.add_entries([entry("a"), entry("a: part"), entry("b"), entry("b", peft="2")])
    assert (adopted.forget_entries({"a"}), names(file)) == (2, ["b", "b"])
    assert (adopted.forget_entries({"c"}), names(file)) == (0, ["b", "b"])
    assert (adopted.forget_entries(()), names(file)) == (2, [])


def test_nothing_to_add_writes_nothing(file):
    adopted.add_entries([])
    assert not file.parent.exists()


@LOCKS
def test_two_processes_that_write_at_once_lose_nothing_and_a_reader_sees_whole_files(file):
    adopted.add_entries([entry("first")])
    writers = [subprocess.Popen([sys.executable, "-c", ADD, name, str(ROUNDS)]) for name in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        found = names(file)
        assert len(found) >= len(seen), "what was there is gone"
        assert found[0] == "first"
        seen.update(found)
    assert [writer.wait() for writer in writers] == [0, 0]
    expected = {"first", *(f"{name}-{number}" for name in "ab" for number in range(ROUNDS))}
    assert set(names(file)) == expected and len(names(file)) == len(expected)
    assert not beside(file)


@LOCKS
def test_threads_that_write_at_once_lose_nothing(file):
    def write(name: str) -> None:
        for number in range(ROUNDS):
            adopted.add_entries([entry(f"{name}-{number}")])

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names(file))) == 2 * ROUNDS


@POSIX
def test_a_full_disk_leaves_the_file_as_it_was(file):
    adopted.add_entries([entry("known")])
    before = file.read_bytes()
    source = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from patches.newer_releases import adopted
try:
    adopted.add_entries([adopted.Entry(str(number), {"peft": "1"}, "0123" * 8, "2026-11-27") for number in range(200)])
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout == "File too large\n", done.stderr
    assert file.read_bytes() == before and not beside(file)


def test_a_file_in_the_place_of_the_folder_is_an_error_of_the_system(file):
    file.parent.write_text("mine")
    with pytest.raises(OSError):
        adopted.add_entries([entry()])
    assert adopted.forget_entries(()) == 0
    assert file.parent.read_text() == "mine"


@POSIX
def test_a_folder_that_nobody_can_write_is_an_error_of_the_system(monkeypatch):
    if not os.path.isdir("/proc/self"):
        pytest.skip("there is no /proc")
    monkeypatch.setenv(adopted.VARIABLE, "/proc/self/own.json")
    with pytest.raises(OSError):
        adopted.add_entries([entry()])


@POSIX
def test_a_device_a_pipe_and_a_folder_are_not_replaced(tmp_path, monkeypatch):
    device, pipe, folder = Path("/dev/null"), tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (device, pipe, folder):
        monkeypatch.setenv(adopted.VARIABLE, str(path))
        for change in (lambda: adopted.add_entries([entry()]), lambda: adopted.forget_entries(())):
            with pytest.raises(OSError, match="it is no file"):
                change()
    assert device.is_char_device() and pipe.is_fifo() and not list(folder.iterdir())


@POSIX
def test_a_link_stays_a_link(file, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file.parent.mkdir()
    file.symlink_to(tmp_path / "elsewhere" / "real.json")
    adopted.add_entries([entry()])
    adopted.add_entries([entry("b")])
    assert file.is_symlink() and names(file) == names(tmp_path / "elsewhere" / "real.json") == ["a", "b"]


@POSIX
def test_the_folder_is_the_users_own_and_the_file_can_be_read_by_others(file):
    before = os.umask(0)
    try:
        adopted.add_entries([entry()])
    finally:
        os.umask(before)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o644


def test_what_is_written_is_a_line_for_each_entry(file):
    adopted.add_entries([entry("a"), entry("b")])
    first, *rows, last = file.read_text("utf-8").splitlines()
    assert (first, last) == ('{"format": 1, "entries": [', "]}")
    assert [json.loads(row.rstrip(","))["patch"] for row in rows] == ["a", "b"]
