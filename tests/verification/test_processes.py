"""Questions in fresh processes: every answer comes, whatever becomes of the process, and none is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from patches.verification import processes, worker
from patches.verification.processes import NoInterpreter, ask_processes
from patches.verification.worker import Answer

TOYS = "tests.verification.toys"
ROOT = str(Path(__file__).parents[2])
FORKS = processes._can_fork()
PROC = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc to look for processes in")
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals have no numbers here")


@pytest.fixture(params=["forked", "interpreters"])
def kind(request, monkeypatch) -> str:
    """Both ways to make a process."""
    if request.param == "interpreters":
        monkeypatch.setattr(processes, "_can_fork", lambda: False)
    elif not FORKS:
        pytest.skip("this system is not forked")
    return request.param


@pytest.fixture(autouse=True)
def folder(tmp_path_factory, monkeypatch) -> Path:
    """Where the answers lie while they come, and nothing afterwards."""
    folder = tmp_path_factory.mktemp("answers")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert not list(folder.iterdir())


def answers(*questions: tuple[str, ...], jobs: int = 2, preload: tuple[str, ...] = ()) -> list[Answer]:
    got = dict(ask_processes(f"{TOYS}:answer", questions, preload, "", jobs, 30))
    assert sorted(got) == list(range(len(questions)))
    return [got[index] for index in sorted(got)]


def test_each_question_has_its_own_answer_whatever_is_printed(kind, capfd):
    assert answers(("echo", "a"), ("noise",), ("echo", "c\udcff")) == [
        (True, "a"),
        (False, "heard \u2026"),
        (True, "c\udcff"),
    ]
    assert capfd.readouterr() == ("", "")


@POSIX
def test_a_process_without_an_answer_is_described(kind):
    said = answers(("die", "7"), ("kill", "SIGSEGV"), ("leave",), ("fail", "no"), ("die", "0"))
    assert [present for present, _ in said] == [None] * 5
    died, killed, left, failed, silent = (figure for _, figure in said)
    assert died == "the process ended with exit code 7"
    assert killed == "the process was killed by SIGSEGV"
    assert left.startswith("SystemExit at toys.py:") and left.endswith("I leave")
    assert failed.startswith("ValueError at toys.py:") and failed.endswith("no on two lines")
    assert silent == "the process ended with exit code 0"


# To a worker that has imported it, each look at the clock is a minute later: no test waits for an end of patience.
HURRIES = """
import itertools, time, types
from patches.verification import worker
worker.time = types.SimpleNamespace(monotonic=itertools.count(time.monotonic() + 60, step=60).__next__)
"""


def test_an_answer_that_takes_too_long(kind, tmp_path, monkeypatch):
    (tmp_path / "hurries_toy.py").write_text(HURRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(worker, "time", worker.time)  # where interpreters answer, this process looks at the clock
    if kind == "interpreters":
        exec(HURRIES, {})
    assert answers(("sleep", "60"), preload=("hurries_toy",)) == [(None, "no answer in 30 s")]


def test_so_many_at_a_time(kind):
    spans = [tuple(map(float, figure.split())) for _, figure in answers(*[("span",)] * 5, jobs=2)]
    assert all(sum(start <= moment < end for start, end in spans) <= 2 for moment, _ in spans)


@pytest.mark.skipif(not FORKS, reason="this system is not forked")
def test_forked_from_one_that_has_imported():
    parent, imported, own = answers(("where",))[0][1].split()
    assert parent == imported != own != str(os.getpid())


@pytest.mark.parametrize(
    "preloaded",
    [
        "import sys; sys.exit('not here')",
        "import os; os._exit(3)",
        HURRIES + "time.sleep(60)",
        "import sys, types; sys.modules['torch'] = types.SimpleNamespace("
        "accelerator=types.SimpleNamespace(is_available=lambda: True))",  # what a host with one says
    ],
    ids=["leaves", "dies", "hangs", "accelerator"],
)
def test_where_no_server_can_fork_each_gets_an_interpreter(tmp_path, monkeypatch, preloaded):
    (tmp_path / "preloaded_toy.py").write_text(preloaded)
    monkeypatch.syspath_prepend(str(tmp_path))
    parent, imported, own = answers(("where",), preload=("preloaded_toy",))[0][1].split()
    assert (parent, imported) == (str(os.getpid()), own)


@pytest.mark.skipif(not FORKS, reason="this system is not forked")
def test_what_the_server_prepared_all_have():
    got = dict(ask_processes(f"{TOYS}:answer", [("prepared",)] * 2, (), f"{TOYS}:prepare", 2, 30))
    servers = {server for _, figure in got.values() for server in figure.split()}
    assert len(got) == 2 and len(servers) == 1 and str(os.getpid()) not in servers


@pytest.mark.skipif(not FORKS, reason="this system is not forked")
def test_a_server_that_is_killed_meanwhile_loses_no_question(tmp_path):
    killed = tmp_path / "killed"
    questions = [("where",), ("until", str(killed)), ("where",)]
    with contextlib.closing(ask_processes(f"{TOYS}:answer", questions, (), "", 1, 30)) as asked:
        index, (_, figure) = next(asked)
        os.kill(int(figure.split()[0]), signal.SIGKILL)
        killed.touch()
        rest = dict(asked)
    assert index == 0 and rest[1] == (True, "it is there") and rest[2][1].split()[0] == str(os.getpid())


def test_from_a_thread_and_at_the_same_time(kind):
    said: dict[str, list[Answer]] = {}
    threads = [threading.Thread(target=lambda n=n: said.update({n: answers(("echo", n))})) for n in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {"a": [(True, "a")], "b": [(True, "b")]}


def test_another_package_of_our_name_is_in_the_way(tmp_path, monkeypatch, kind):
    (tmp_path / "patches.py").write_text("raise SystemExit('the user module ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert answers(("echo", "ours")) == [(True, "ours")]


@pytest.mark.parametrize("attribute, value", [("frozen", True), ("executable", "")])
def test_a_program_without_an_interpreter_says_so(monkeypatch, attribute, value):
    monkeypatch.setattr(sys, attribute, value, raising=False)
    with pytest.raises(NoInterpreter, match="no Python interpreter"):
        answers(("echo",))


# -- the end -------------------------------------------------------------------------------------


def marked(mark: str) -> set[int]:
    """The processes that run with ``mark`` in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"MARK={mark}\0".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))  # one that has ended and waits for its parent has no environment
    return found


def gone_within(seconds: float, mark: str) -> bool:
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not marked(mark)


ASK = f"""
import sys
from patches.verification import processes, worker
if {{kind!r}} == "interpreters":
    processes._can_fork = lambda: False
try:
    for _ in processes.ask_processes("{TOYS}:answer", [("linger", path) for path in sys.argv[1:]], (), "", 2, 60):
        pass
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


@PROC
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_whoever_asks_takes_all_processes_along(tmp_path, folder, kind, sent):
    """Also those that the questions have started, and when there is no time to say goodbye."""
    mark, ready = f"{tmp_path}", [tmp_path / "one", tmp_path / "two"]
    env = {**os.environ, "MARK": mark, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], ROOT])}
    asker = subprocess.Popen(
        [sys.executable, "-c", ASK.format(kind=kind), *map(str, ready)], env=env, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in ready):
            assert asker.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert len(marked(mark)) >= 5  # the asker, two that answer, and what they have started
        asker.send_signal(sent)
        asker.communicate(timeout=2)
        assert gone_within(2, mark)
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
    assert asker.returncode == (1 if sent is signal.SIGINT else -sent)
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)


@PROC
def test_to_stop_listening_ends_all(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("MARK", str(tmp_path))
    asked = ask_processes(f"{TOYS}:answer", [("echo", "first"), ("linger", str(tmp_path / "ready"))], (), "", 2, 60)
    assert next(asked) == (0, (True, "first"))
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    assert marked(str(tmp_path))
    asked.close()
    assert gone_within(2, str(tmp_path))
