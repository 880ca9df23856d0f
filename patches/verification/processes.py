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
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol

from .worker import Answer, Asked, Crew, read_answer

TIMEOUT = 300.0
"""Seconds that one question may take; on a busy machine the first of them pays for the imports."""

BOOT = """\
import sys
sys.path[:] = {path}
import importlib.util
if {file} and {package} not in sys.modules:  # by its file: another package of this name may come first
    spec = importlib.util.spec_from_file_location({package}, {file}, submodule_search_locations=[{home}])
    sys.modules[{package}] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
importlib.import_module({worker}).{call}
"""


class NoInterpreter(RuntimeError):
    """There is no Python interpreter to start."""


class Workers(Protocol):
    """Whatever makes answers appear in the folder."""

    def tend(self) -> bool:
        """Do the pending work; False when no more answers will come."""

    def close(self) -> None:
        """End all processes at once."""


def ask_processes(
    function: str,
    questions: Sequence[Sequence[str]],
    preload: Sequence[str],
    prepare: str,
    jobs: int,
    timeout: float | None = None,
) -> Generator[tuple[int, Answer], None, None]:
    """Call ``function`` (``module:name``) with each of ``questions``; yield their indices and answers as they come.

    To close the iterator, which an exception in it does as well, ends all processes.

    Raises
    ------
    NoInterpreter
        This program is frozen, or runs in another one.
    """
    if not questions:
        return
    if getattr(sys, "frozen", False) or not sys.executable:
        raise NoInterpreter("reproducers run in processes of their own, and this program has no Python interpreter")
    timeout = TIMEOUT if timeout is None else timeout
    left = set(range(len(questions)))
    with tempfile.TemporaryDirectory(prefix="bnb-patches-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        Asked(function, questions, preload, prepare, jobs, timeout).write(folder)
        if _can_fork():
            yield from _gather(folder, left, _ForkServer(folder))
        yield from _gather(folder, left, Crew(folder, left, lambda i: _start_one(folder, i), jobs, timeout))


def _gather(folder: Path, left: set[int], workers: Workers) -> Generator[tuple[int, Answer], None, None]:
    """Yield the answers to the questions ``left``, which loses them, until ``workers`` give no more."""
    with contextlib.closing(workers):
        while left:
            goes_on = workers.tend()  # before the look into the folder, else the last answers were missed
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

    def end(self) -> None:
        if self.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(OSError):
                self.kill() if sys.platform == "win32" else os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        assert self.stdin is not None
        self.stdin.close()


class _ForkServer:
    def __init__(self, folder: Path) -> None:
        self._process = _Interpreter(f"serve_questions({ascii(str(folder))})")

    def tend(self) -> bool:
        """Whether it runs. It is not reaped: the group keeps its number, and can be killed, while it has children."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def close(self) -> None:
        self._process.end()


def _can_fork() -> bool:
    return sys.platform not in ("darwin", "win32")


def _start_one(folder: Path, index: int) -> _Interpreter:
    return _Interpreter(f"answer_one({ascii(str(folder))}, {index})")


def _boot(call: str) -> str:
    """Source that finds our package under the name that it has here, and what this process finds."""
    worker = __name__.rpartition(".")[0] + ".worker"
    package = worker.rpartition(".verification.")[0]
    file = getattr(sys.modules[package], "__file__", None) or ""
    known = {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "package": package,
        "file": file if os.path.isfile(file) and "." not in package else "",  # else it is found by its name
        "home": os.path.dirname(file),
        "worker": worker,
    }
    return BOOT.format(**{name: ascii(value) for name, value in known.items()}, call=call)
