"""Questions asked in fresh processes, each in one of its own, several at a time.

On a CPU the processes are forked from a server that has imported the packages, so that each costs little. A CUDA
runtime does not survive a fork, nor do the frameworks of macOS, and Windows has none: there, and wherever the
server ends early, each question gets an interpreter of its own. The processes are started with ``python -c``
and not by multiprocessing, whose children run the user's script again unless it has a main guard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from .worker import Answer, Crew, Task, read_answer

TIMEOUT = 300.0
"""Seconds that one question may take; on a busy machine the first of them pays for the imports."""

BOOT = """\
import sys
sys.path[:] = {path!a}
import importlib.util
if {file!a} and {package!a} not in sys.modules:  # by its file: another package of this name may come first
    spec = importlib.util.spec_from_file_location({package!a}, {file!a}, submodule_search_locations=[{home!a}])
    sys.modules[{package!a}] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
importlib.import_module({worker!a}).{call}
"""


class NoInterpreter(RuntimeError):
    """There is no Python interpreter to start."""


def ask_processes(
    function: str,
    questions: Sequence[Sequence[str]],
    preload: Sequence[str],
    prepare: str,
    jobs: int,
    timeout: float = TIMEOUT,
) -> Generator[tuple[int, Answer], None, None]:
    """Call ``function`` with each of ``questions``; yield their indices and answers as they come.

    Closing the iterator, which an exception in it does as well, ends all processes.

    Parameters
    ----------
    function:
        ``module:name``; called with the strings of a question, it returns the answer.
    preload:
        Modules that the fork server imports once for all.
    prepare:
        ``module:name``, called in the fork server once, after these imports; empty for none.
    jobs:
        How many processes run at a time.
    timeout:
        Seconds that one question may take, and that the preloading may take.

    Raises
    ------
    NoInterpreter
        This program is frozen, or runs in another one.
    """
    if not questions:
        return
    if getattr(sys, "frozen", False) or not sys.executable:
        raise NoInterpreter("reproducers run in processes of their own, and this program has no Python interpreter")
    left = set(range(len(questions)))
    with tempfile.TemporaryDirectory(prefix="bnb-patches-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        Task(function, questions, preload, prepare, jobs, timeout).write(folder)
        if _can_fork():
            with contextlib.closing(_start_server(folder)) as server:
                yield from _gather(folder, left, lambda: _is_running(server.pid))
        with contextlib.closing(Crew(folder, left, lambda index: _start_one(folder, index), jobs, timeout)) as crew:
            yield from _gather(folder, left, crew.tend)


def _gather(folder: Path, left: set[int], tend: Callable[[], bool]) -> Generator[tuple[int, Answer], None, None]:
    """Yield answers as they appear in ``folder``, and remove them from ``left``, until ``tend`` says that no more come."""
    while left:
        goes_on = tend()  # before the look into the folder, else the last answers were missed
        names = set(os.listdir(folder))
        found = [index for index in sorted(left) if f"{index}.json" in names]
        for index in found:
            left.discard(index)
            yield index, read_answer(folder, index)
        if not goes_on and not found:
            return
        if not found:
            time.sleep(0.05)


class _Interpreter(subprocess.Popen[bytes]):
    """A Python that runs a call of our worker, in a process group of its own, and ends when this process does."""

    def __init__(self, call: str) -> None:
        super().__init__(
            [sys.executable, "-c", _boot(call)],
            stdin=subprocess.PIPE,  # never written to; its end tells the worker that we are gone
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PATCHES_AUTOLOAD": "0"},
            start_new_session=True,  # Ctrl-C is for us; we end the group
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )

    def close(self) -> None:
        """Kill it with all that it has started, if it still runs, and wait for it."""
        if self.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(OSError):
                self.kill() if sys.platform == "win32" else os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        assert self.stdin is not None
        self.stdin.close()


def number_of_jobs(asked: int | None) -> int:
    """Return how many processes to run at a time: ``asked``, else as many as there are processors here, at most four.

    Raises ``ValueError`` if that is less than one.
    """
    if asked is None:
        return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if asked < 1:
        raise ValueError(f"jobs must be 1 or more, not {asked}")
    return asked


def _can_fork() -> bool:
    return sys.platform not in ("darwin", "win32")


def _start_server(folder: Path) -> _Interpreter:
    return _Interpreter(f"serve_questions({ascii(str(folder))})")


def _start_one(folder: Path, index: int) -> _Interpreter:
    return _Interpreter(f"answer_one({ascii(str(folder))}, {index})")


def _is_running(pid: int) -> bool:
    """Tell whether it runs. It is not reaped: the group keeps its number, and can be killed, while it has children."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _boot(call: str) -> str:
    """Return source that calls our worker: it finds our package under its present name, and all else that is found here."""
    package = __name__.removesuffix(".verification.processes")
    file = getattr(sys.modules[package], "__file__", None) or ""
    return BOOT.format(
        path=[entry for entry in sys.path if isinstance(entry, str)],
        package=package,
        file=file if os.path.isfile(file) and "." not in package else "",  # else it is found by its name
        home=os.path.dirname(file),
        worker=f"{package}.verification.worker",
        call=call,
    )
