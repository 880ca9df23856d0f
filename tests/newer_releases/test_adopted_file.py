"""Reading the file of adopted patches: what others could have written, or nobody can read, counts for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from patches.newer_releases import adopted

POSIX = pytest.mark.skipif(os.name != "posix", reason="files have no owner and no mode here")
ENTRY = adopted.Entry("peft-dora-cache", {"python": "3.12", "peft": "0.22.0"}, "0123abcd", "2026-11-27")


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """The file, with one entry, which ``$PATCHES_ADOPTED`` names."""
    path = tmp_path / "own.json"
    monkeypatch.setenv(adopted.VARIABLE, str(path))
    adopted.add_entries([ENTRY])
    return path


def why(path: Path) -> str:
    with pytest.raises(adopted.Unusable) as said:
        adopted.read_entries(path)
    return str(said.value)


def test_what_was_added_is_read(file):
    assert adopted.read_entries(file) == [ENTRY]
    assert json.loads(file.read_text())["format"] == 1


def test_no_file_is_no_entries_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(adopted.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    assert adopted.read_entries(adopted.adopted_file()) == []
    (tmp_path / "none").write_text("a file where the folder would be")
    assert adopted.read_entries(adopted.adopted_file()) == []
    monkeypatch.setenv(adopted.VARIABLE, str(tmp_path / "missing"))
    assert "PATCHES_ADOPTED=" in why(adopted.adopted_file()) and "there is no such file" in why(adopted.adopted_file())


@pytest.mark.parametrize("content", [
    "", "{", "null", "[]", '"text"', "3", "{}", '{"format": 1}', '{"format": 1, "entries": 3}',
    '{"format": 1, "entries": [3]}', '{"format": 1, "entries": [{}]}', '{"format": 1, "entries": {"a": 1}}',
    '{"format": 2, "entries": []}', '{"format": 1, "entries": null}', "[" * 100_000, "\0" * 100, "\ufeff{}",
    '{"format": 1, "entries": [{"patch": "a", "versions": [], "sources": "b", "on": "c"}]}',
    '{"format": 1, "entries": [{"patch": 1, "versions": {}, "sources": "b", "on": "c"}]}',
])  # fmt: skip
def test_a_file_with_another_content_is_damaged(file, content):
    file.write_text(content, "utf-8")
    assert why(file) == f"{file} is damaged, and counts for nothing; `python -m patches adopt` writes it anew"
    adopted.add_entries([ENTRY])
    assert adopted.read_entries(file) == [ENTRY], "it is written anew"


def test_a_file_that_was_cut_short_anywhere_is_damaged(file):
    whole = file.read_bytes()
    for end in range(len(whole) - 2):  # the last brace and the end of the line are all that may be missing or not
        file.write_bytes(whole[:end])
        assert "is damaged" in why(file), whole[:end]


def test_bytes_that_are_no_text_are_damage(file):
    file.write_bytes(b"\xff\xfe" + file.read_bytes())
    assert "is damaged" in why(file)


def test_a_file_of_many_megabytes_is_damaged(file):
    with open(file, "r+b") as opened:
        opened.truncate(50_000_000)
    assert "is damaged" in why(file)


@POSIX
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o620, 0o602])
def test_what_others_can_write_to_counts_for_nothing(file, mode):
    file.chmod(mode)
    assert why(file).endswith(f"can be written to by others, and counts for nothing; to change that: chmod go-w {file}")


@POSIX
def test_a_mask_that_lets_a_group_write_does_not_spoil_our_own_file(file):
    before = os.umask(0o002)
    try:
        adopted.add_entries([ENTRY._replace(patch="another")])
    finally:
        os.umask(before)
    assert len(adopted.read_entries(file)) == 2


@POSIX
def test_a_file_of_another_user_counts_for_nothing(file):
    try:
        os.chown(file, os.geteuid() + 4321, -1)
    except PermissionError:
        pytest.skip("only the superuser can give a file away")
    assert why(file) == f"{file} belongs to another user, and counts for nothing; remove it"


@POSIX
def test_a_file_that_cannot_be_read_counts_for_nothing(file):
    said = "cannot be read (Permission denied), and counts for nothing"
    if os.geteuid():
        file.chmod(0)
        assert why(file) == f"{file} {said}"
        return
    source = """
import os, sys
from patches.newer_releases import adopted
os.setgroups([]); os.setgid(54321); os.setuid(54321)
try:
    adopted.read_entries(adopted.Path(sys.argv[1]))
except adopted.Unusable as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as folder:  # those of pytest let no other user in
        os.chmod(folder, 0o755)
        own = Path(folder, "own.json")
        own.touch(0o600)
        done = subprocess.run([sys.executable, "-c", source, str(own)], capture_output=True, text=True)
    assert done.stdout == f"{own} {said}\n", done.stderr


def test_a_folder_counts_for_nothing(tmp_path):
    assert "counts for nothing" in why(tmp_path)


@POSIX
def test_a_pipe_that_nobody_writes_to_and_a_device_count_for_nothing_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        assert why(path) == f"{path} is no file, and counts for nothing"


@POSIX
def test_the_file_of_the_superuser_counts(file):
    if os.geteuid():
        pytest.skip("only the superuser has files of the superuser")
    assert file.stat().st_uid == 0 and adopted.read_entries(file) == [ENTRY]


@POSIX
def test_without_a_home_there_is_no_place_and_nothing_breaks(monkeypatch):
    """As in a container with a user that has no name."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in (adopted.VARIABLE, "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(adopted.Nowhere, match="there is no home folder"):
        adopted.adopted_file()
