"""Forks of the server are to a test what new processes are: :mod:`.forks`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from patches.engine import gate  # noqa: E402
from tests import forks, processor  # noqa: E402

SAYS = """
import json, os, sys
assert __name__ == "__main__" and sys.modules["__main__"].json is json
late = [name for name in ("bitsandbytes", "peft", "patches") if name in sys.modules]
found = {"argv": sys.argv, "here": os.getcwd(), "set": os.environ.get("SET"), "late": late, "first": sys.path[0]}
print(json.dumps({**found, "stdin": sys.stdin.read(), "torch": "torch" in sys.modules}))
"""


def run(source: str, *arguments: str, timeout: float = 60, **environ: str) -> tuple[int, str, str]:
    program = forks.Program(["-c", source, *arguments], {**os.environ, **environ})
    (done,) = forks.run(program, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kind", ["source", "file"])
def test_a_program_finds_what_it_was_given_and_nothing_else(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "says.py"
    file.write_text(SAYS)
    start = ["-c", SAYS] if kind == "source" else [str(file)]
    program = forks.Program([*start, "a", "b"], {**os.environ, "SET": "1"}, str(tmp_path))
    (done,) = forks.run(program, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["argv"] == [start[0], "a", "b"] and found["first"] == ("" if kind == "source" else str(tmp_path))
    assert found["here"] == str(tmp_path) and found["set"] == "1" and found["stdin"] == "" and not found["late"]
    assert run(SAYS)[0] == 0 and json.loads(run(SAYS)[1])["set"] is None, "nothing is left to the next"


@pytest.mark.parametrize(
    "source, code, said",
    [
        ("import sys; print('done'); sys.exit(3)", 3, "done"),
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
        ("import threading, time; threading.Thread(target=lambda: time.sleep(0.1) or print('thread')).start()", 0, "thread"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)  # fmt: skip
def test_it_ends_as_an_interpreter_ends(source: str, code: int, said: str) -> None:
    returned, out, err = run(source)
    assert returned == code and said in out + err


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no server, and no /proc to ask")


@LINUX
def test_one_that_hangs_is_killed_with_what_it_started() -> None:
    source = (
        "import os, subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin = open(0)\n"
    )
    returned, out, _ = run(source + "while True: pass", timeout=2)
    assert returned == forks.TIMED_OUT
    late = time.monotonic() + 10
    while _runs(int(out)):  # it is not ours to wait for
        assert time.monotonic() < late
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):  # it may end meanwhile
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_when_one_of_two_fails_the_other_is_killed() -> None:
    fails, waits = (
        forks.Program(["-c", source], dict(os.environ)) for source in ("1 / 0", "import time; time.sleep(60)")
    )
    first, second = forks.run(fails, waits, timeout=30)
    assert first.returncode == 1 and second.returncode == forks.TIMED_OUT


@pytest.mark.parametrize("kind", processor.KINDS)
def test_each_has_the_processor_that_it_asks_for(kind: str) -> None:
    if not gate.satisfied("bitsandbytes>=0.49"):
        pytest.skip("before 0.49 bitsandbytes does not ask the processor")
    asks = "from bitsandbytes.functional import has_avx512bf16; print('says', bool(has_avx512bf16()))"
    expected = {"plain": False, "emulated": True, "host": processor.host_has_avx512bf16()}[kind]
    assert f"says {expected}" in run(asks, PATCHES_TEST_PROCESSOR=kind)[1]


def test_what_runs_too_long_says_where_it_stands() -> None:
    code, _, err = run("import time\ndef stands_here():\n    time.sleep(60)\nstands_here()", timeout=2)
    assert code == forks.TIMED_OUT and "in stands_here" in err


@LINUX
def test_when_nobody_waits_any_more_it_is_killed(tmp_path: Path) -> None:
    """A run of the suite that is stopped leaves nothing behind."""
    connection = forks.Connection(forks._connection().address)
    number = tmp_path / "pid"
    source = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(60)"
    program = forks.Program(["-c", source, str(number)], dict(os.environ), out=str(tmp_path / "said"))
    connection.send([program], timeout=50)
    late = time.monotonic() + 20
    while not (number.exists() and number.read_text().endswith("\n")):
        assert time.monotonic() < late
        time.sleep(0.01)
    connection.close()
    while _runs(int(number.read_text())):
        assert time.monotonic() < late
        time.sleep(0.01)


@LINUX
def test_a_server_that_has_other_packages_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, own = str(tmp_path / "socket"), forks._connection().address
    monkeypatch.setattr(forks, "_own", lambda: SimpleNamespace(address=own))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        monkeypatch.setenv(forks.VARIABLE, address)
        asked = threading.Thread(target=_answer, args=(listener, {**forks.origins(), "transformers": "elsewhere"}))
        asked.start()
        found = forks._connection.__wrapped__()
        asked.join()
    assert found.address == own and found.has == forks.origins()


def _answer(listener: socket.socket, has: dict[str, str | None]) -> None:
    connection, _ = listener.accept()
    with connection, connection.makefile("w") as file:
        print(json.dumps(has), file=file)
