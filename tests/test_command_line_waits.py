"""While a command imports or runs others: what libraries print is held back, and a line says what takes long."""

from __future__ import annotations

import json
import os
import subprocess
import threading

import pytest

from patches import verification
from patches.command_line import main, notice, streams
from patches.verification import Verification
from tests.test_command_line import LIGHT, NEEDS_TORCH, SHELL, run

# Prints when accelerate is imported, in each way in which a library prints.
NOISY = """
import atexit, ctypes, os, sys
class Greeter:
    def find_spec(self, name, path=None, target=None):
        if name == "accelerate" and self in sys.meta_path:
            sys.meta_path.remove(self)
            print("hello from Python")
            os.write(1, b"hello from a descriptor\\n")
            print("hello from standard error", file=sys.stderr)
            ctypes.CDLL(None).printf(b"hello from a buffer of C, which is written at exit\\n")
            atexit.register(print, "goodbye")
sys.meta_path.insert(0, Greeter())
"""


NOISE = ("hello from Python", "hello from a descriptor", "hello from standard error")


@NEEDS_TORCH
@SHELL
@pytest.mark.parametrize("arguments", [("report", "--live", "--json"), ("diff", "--json")], ids=["report", "diff"])
def test_what_libraries_print_at_their_import_is_held_back(arguments):
    env = {"PATCHES_AUTOLOAD": "1", "PYTHONUNBUFFERED": ""}  # which would be for C as well
    done = run(*arguments, LIGHT, source=NOISY, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.get(LIGHT) or [row["status"] for row in found["results"]] == ["applied"]
    assert not any(word in done.stderr for word in NOISE)
    assert all(word in done.stderr for word in ("a buffer of C", "goodbye")), "what comes after the answer is not lost"


@NEEDS_TORCH
@SHELL
def test_what_they_print_is_shown_after_the_answer_if_an_import_fails(tmp_path):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("raise RuntimeError('built for another torch')\n")
    (tmp_path / "accelerate-1.15.0.dist-info").mkdir()
    (tmp_path / "accelerate-1.15.0.dist-info" / "METADATA").write_text("Name: accelerate\nVersion: 1.15.0\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    done = run("report", "--live", LIGHT, source=NOISY, stderr=subprocess.STDOUT, env={"PYTHONPATH": path})
    assert done.returncode == 0 and "built for another torch" in done.stdout
    places = [done.stdout.index(word) for word in (f"pending  {LIGHT}", "this was printed:", NOISE[0])]
    assert places == sorted(places) and all(done.stdout.count(word) == 1 for word in NOISE)


def test_what_was_held_back_is_shown_with_an_error(capfd):
    with pytest.raises(ZeroDivisionError), streams.hold_back():
        os.write(1, b"a library\n")
        print(1 / 0)
    assert capfd.readouterr().err == "a library\n"


def test_a_stream_that_is_held_back_is_itself_again(capfd):
    with streams.hold_back() as held:
        os.write(2, b"held\n" * 10_000)
        held.errors.write("ours\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "ours\nafter\n"
    assert 10_000 < len(held.text) < 40_000 and set(held.text.split()) == {"held"}


# -- one that takes long -------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch) -> threading.Event:
    """Set as soon as the line of a command that takes long was written, which is at once."""
    written, write = threading.Event(), os.write
    monkeypatch.setattr(notice, "SECONDS", 0.0)
    monkeypatch.setattr(notice.os, "write", lambda *a: (write(*a), written.set()))
    return written


def test_a_command_that_takes_long_says_what_it_is_doing(slow, capfd, monkeypatch):
    monkeypatch.setattr(verification, "verify", lambda *a, **k: slow.wait(60) and Verification(()))
    assert main(["verify"]) == 0
    line = "patches: running each reproducer in fresh processes: without its patch, with it, with all patches, after revert ...\n"
    assert capfd.readouterr().err == line


def test_the_line_is_written_while_other_output_is_held_back(slow, capfd):
    with notice.after_a_while("importing torch"), streams.hold_back():
        os.write(2, b"noise\n")
        assert slow.wait(60)
    assert capfd.readouterr().err == "patches: importing torch ...\n"


def test_a_command_that_is_fast_says_nothing_and_leaves_no_thread(monkeypatch, capfd):
    monkeypatch.setattr(notice, "SECONDS", 600.0)
    before = threading.active_count()
    with notice.after_a_while("importing torch"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert capfd.readouterr().err == ""
