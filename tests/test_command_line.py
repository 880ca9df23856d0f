"""``python -m patches``: the right answer and exit code in one clear line, whatever its streams and its end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import patches
from patches import REGISTRY
from patches.command_line import main
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
