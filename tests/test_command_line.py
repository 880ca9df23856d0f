"""``python -m patches``: the right answer and exit code in one clear line, whatever its streams and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import patches
from patches import REGISTRY
from patches.command_line import main, notice, streams
from patches import verification
from patches.verification import PHASES, Row, Verification
from patches.verification.processes import NoInterpreter
from tests.verification.test_processes import PROC, gone_within, marked

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
SHELL = pytest.mark.skipif(os.name != "posix", reason="there is no POSIX shell to close streams with")
PEFT = "transformers-input-grads-hook"
LIGHT = "accelerate-left-on-device"  # needs neither transformers nor peft, whose imports take seconds


def run(*arguments: str, source: str = "", timeout: float = 300, **options) -> subprocess.CompletedProcess[str]:
    """``python -m patches ARGUMENTS``; with ``source`` run before it in the same process."""
    start = (
        ["-c", f"{source}\nimport sys\nfrom patches.command_line import command\nsys.exit(command())"]
        if source
        else ["-m", "patches"]
    )
    env = {**os.environ, "COLUMNS": "", **options.pop("env", {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *start, *arguments], text=True, env=env, timeout=timeout, **options)


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A line for the shell, ``PATCHES`` being the command."""
    line = line.replace("PATCHES", f"'{sys.executable}' -m patches")
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env={**os.environ, **environ}, timeout=300
    )


# -- what is asked -------------------------------------------------------------------------------


@pytest.mark.parametrize("ok", [True, False])
def test_the_exit_code_of_verify(monkeypatch, capsys, ok):
    row = Row("a", "ok" if ok else "wrong", "", dict.fromkeys(PHASES, (True, "measured")))
    monkeypatch.setattr(verification, "verify", lambda *a, **k: Verification((row,)))
    assert main(["verify"]) == (0 if ok else 1)
    assert "measured" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["list", "report", "diff", "verify"])
def test_an_unknown_id_is_exit_code_2_and_one_line(capsys, command):
    assert main([command, "bitsandbytes-nonsense"]) == 2
    err = capsys.readouterr().err
    assert "no patch is named 'bitsandbytes-nonsense'" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["verify", "--jobs", "-1"], "--jobs: must be a number from 1 on, not -1"),
        (["verify", "--jobs=0"], "--jobs: must be a number from 1 on, not 0"),
        (["verify", "--jobs", "many"], "--jobs: must be a number from 1 on, not many"),
        (["list", "--jobs", "2"], "unrecognized arguments: --jobs"),
        (["lists"], "invalid choice: 'lists'"),
        ([], "command"),
    ],
)
def test_bad_usage_is_exit_code_2_and_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("json_", [False, True])
def test_list(capsys, json_):
    assert main(["list", *(["--json"] if json_ else [])]) == 0
    out = capsys.readouterr().out
    ids = [row["id"] for row in json.loads(out)] if json_ else out
    assert all(patch_id in ids for patch_id in REGISTRY.patches)


@NEEDS_TORCH
def test_report_and_diff_in_a_process_that_has_applied_nothing(forked):
    source = """
        import contextlib, io, json
        from patches.command_line import main
        said = []
        import os
        os.environ["PATCHES_AUTOLOAD"] = "1"
        for line in ("report --json", "diff --json", "diff", "report"):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert main(line.split()) == 0
            said.append(out.getvalue())
        print(json.dumps(said))
    """
    report, diffs, diff, table = json.loads(forked(source).splitlines()[-1])
    results = json.loads(report)["results"]
    assert {r["id"] for r in results} == set(REGISTRY.patches)
    applied = [r["id"] for r in results if r["status"] == "applied"]
    assert applied and f": {len(applied)} applied" in table
    assert set(json.loads(diffs)) == set(applied)
    assert "--- a/" in diff and all(one in diff for one in json.loads(diffs)[applied[0]])


def test_a_program_without_an_interpreter_says_so(monkeypatch, capsys):
    def none(*_, **__):
        raise NoInterpreter("no Python interpreter")

    monkeypatch.setattr(verification, "verify", none)
    assert main(["verify"]) == 2
    assert capsys.readouterr().err == "patches: no Python interpreter\n"


# -- its streams ---------------------------------------------------------------------------------


@SHELL
@pytest.mark.parametrize(
    "line, shown",
    [("PATCHES list 2>&-", True), ("PATCHES list >&-", False), ("PATCHES list <&- >&- 2>&-", False)],
)
def test_closed_streams_change_nothing(line, shown):
    done = shell(line)
    assert (done.returncode, done.stderr, PEFT in done.stdout) == (0, "", shown)


@SHELL
@pytest.mark.parametrize(
    "line", ["PATCHES list nonsense 2>&-", "PATCHES verify --jobs -1 2>&-", "PATCHES list nonsense >&-"]
)
def test_closed_streams_do_not_change_an_exit_code(line):
    assert shell(line).returncode == 2


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = run("list", stdout=full)
    assert (done.returncode, done.stderr) == (2, "patches: cannot write: No space left on device\n")


def test_the_answer_goes_to_standard_output_and_complaints_do_not():
    assert run("--help").stdout.startswith("usage: ")
    assert run("list", "nonsense").stdout == ""


NOT_ASCII = f"""
import dataclasses, patches
patch = patches.REGISTRY.patches["{PEFT}"]
patches.REGISTRY.patches[patch.id] = dataclasses.replace(patch, summary="sch\\u00f6n \\u2026 \\udcff")
"""


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
def test_where_only_ascii_can_be_written_the_rest_is_escaped(env):
    done = run("list", PEFT, source=NOT_ASCII, env=env)
    assert done.returncode == 0, done.stderr
    assert "sch\\xf6n \\u2026 \\udcff" in done.stdout


@pytest.mark.parametrize("columns", ["40", "1", "0", "x"])
def test_narrow_terminals(columns):
    done = run("list", env={"COLUMNS": columns})
    assert done.returncode == 0, done.stderr
    if columns == "40":
        assert max(map(len, done.stdout.splitlines())) <= max(map(len, [*REGISTRY.patches, "x" * 40]))


@SHELL
def test_the_width_is_that_of_the_terminal_it_writes_to():
    """Not that of standard error, to which all others are sent."""
    (screen, out), (_, err) = terminals = _terminal(50), _terminal(200)
    assert run("list", PEFT, stdout=out, stderr=err).returncode == 0
    lines = [line.rstrip() for line in os.read(screen, 4096).decode().splitlines()]
    assert lines[0] == PEFT and max(map(len, lines)) <= 50 < len(REGISTRY.patches[PEFT].summary)
    for descriptor in (*terminals[0], *terminals[1]):
        os.close(descriptor)


def _terminal(columns: int) -> tuple[int, int]:
    """Both ends of a terminal that is so wide."""
    import fcntl
    import pty
    import struct
    import termios

    ends = pty.openpty()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return ends


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
    line = "patches: running each reproducer unpatched, patched and reverted, in fresh processes ...\n"
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


@pytest.mark.release("list, with each of its streams closed")
@NEEDS_TORCH
@SHELL
def test_verify_where_only_standard_output_is_open():
    done = shell(f"PATCHES verify {LIGHT} --json <&- 2>&-")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["id"], row["verdict"], done.returncode) == (LIGHT, "ok", 0)


# -- its end -------------------------------------------------------------------------------------


@NEEDS_TORCH
@PROC
@pytest.mark.parametrize(
    "sent, word, processes",
    [
        pytest.param(
            signal.SIGINT, "interrupted", 2, marks=pytest.mark.release("TERM there, and INT while reproducers run")
        ),
        (signal.SIGTERM, "terminated", 2),
        (signal.SIGINT, "interrupted", 3),
    ],
    ids=["INT while the server imports", "TERM while the server imports", "INT while reproducers run"],
)
def test_stopped_at_once_with_all_its_processes(tmp_path, sent, word, processes):
    mark = str(tmp_path)
    start = [sys.executable, "-m", "patches", "verify", "--jobs", "2", "--json"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(start, env={**os.environ, "MARK": mark, "TMPDIR": mark}, **streams)
    try:
        deadline = time.monotonic() + 120
        while len(marked(mark)) < processes:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(sent)
        out, err = process.communicate(timeout=2)
        assert gone_within(2, mark)
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
    *before, last = err.splitlines()
    assert (process.returncode, out, last) == (128 + sent, "", f"patches: {word}")
    assert not [line for line in before if not line.startswith("patches: running each reproducer")], "if it takes long"
    assert not list(Path(mark).glob("bnb-patches-*"))


def test_explain_and_applied_obey_what_the_environment_disables(monkeypatch, capsys):
    """Also where nothing was applied by the import: the settings are read by the call."""
    pytest.importorskip("bitsandbytes")
    disabled = "bitsandbytes-int8-cast-message"
    monkeypatch.setattr(REGISTRY, "disabled", frozenset())
    monkeypatch.setenv("PATCHES_DISABLE", disabled)
    with patches.applied(disabled) as report:
        assert report[disabled].status is patches.Status.DISABLED and not report[disabled].changes
    assert main(["explain", disabled]) == 0
    assert "Here: disabled (PATCHES_DISABLE names it or its group)." in capsys.readouterr().out
    monkeypatch.delenv("PATCHES_DISABLE")
    with patches.applied(disabled) as report:
        assert report[disabled].status is not patches.Status.DISABLED
