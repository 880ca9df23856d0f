"""Run in the processes that :mod:`.processes` starts, and look after them.

A question is a call of one function of a module, its answer ``(present, figure)``; both travel as files in a
folder that the asking process has made, so nothing that a library prints or closes can come between. A process that
asked holds the other end of our standard input: when that ends, it is gone, and so are we.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

Answer = tuple[bool | None, str]
"""True if the defect is there (None: no answer), and the figure, or why there is no answer."""

TICK = 0.01
"""Seconds between two looks at the processes that run."""


class Task(NamedTuple):
    """The arguments of :func:`.processes.ask_processes`, as every worker reads them from the folder."""

    function: str
    questions: Sequence[Sequence[str]]
    preload: Sequence[str]
    prepare: str
    jobs: int
    timeout: float

    def write(self, folder: Path) -> None:
        (folder / "task").write_text(json.dumps(self))

    @classmethod
    def read(cls, folder: Path) -> Task:
        return cls(*json.loads((folder / "task").read_text()))


def write_answer(folder: Path, index: int, answer: Answer) -> None:
    """Write an answer; it appears whole or not at all."""
    half = folder / f"{index}.half"
    half.write_text(json.dumps(answer))
    half.replace(folder / f"{index}.json")


def read_answer(folder: Path, index: int) -> Answer:
    present, figure = json.loads((folder / f"{index}.json").read_text())
    return present, figure


class Child(Protocol):
    """A process that was started to answer one question."""

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""

    def close(self) -> None:
        """Kill it if it still runs, and wait for it."""


class Crew:
    """At most ``jobs`` children at a time, until each question in ``waiting`` has an answer in ``folder``."""

    def __init__(
        self, folder: Path, waiting: Iterable[int], start: Callable[[int], Child], jobs: int, timeout: float
    ) -> None:
        self._folder, self._waiting, self._start = folder, sorted(waiting), start
        self._jobs, self._timeout = jobs, timeout
        self._running: dict[int, tuple[Child, float]] = {}

    def tend(self) -> bool:
        """Look after the children once: start, answer for each that died or takes too long. Return False at the end."""
        for index, (child, deadline) in list(self._running.items()):
            code = child.poll()  # before the look at the file, which comes first
            if not (self._folder / f"{index}.json").exists():
                if code is None and time.monotonic() < deadline:
                    continue
                why = f"no answer in {self._timeout:.0f} s" if code is None else describe_exit(code)
                write_answer(self._folder, index, (None, why))
            child.close()
            del self._running[index]
        while self._waiting and len(self._running) < self._jobs:
            index = self._waiting.pop(0)
            self._running[index] = self._start(index), time.monotonic() + self._timeout
        return bool(self._running)

    def close(self) -> None:
        """End all that run."""
        for child, _ in self._running.values():
            child.close()


def describe_exit(code: int) -> str:
    """Say in words how a process ended that gave no answer."""
    if code >= 0:
        return f"the process ended with exit code {code if code < 256 else hex(code)}"
    with contextlib.suppress(ValueError):
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process was killed by signal {-code}"


# -- in a started interpreter ------------------------------------------------------------------


def answer_one(folder: str, index: int) -> None:
    """Answer one question in this interpreter, and end it."""
    asker = _Asker(Path(folder))
    threading.Thread(target=asker.wait_for_its_end, daemon=True).start()
    _answer(asker.folder, Task.read(asker.folder), index)


def serve_questions(folder: str) -> None:
    """Import once, then fork a process for each question. Where a fork is not possible, end without an answer."""
    asker = _Asker(Path(folder))
    task = Task.read(asker.folder)
    if not _preload(task, asker):
        return
    indices = range(len(task.questions))
    crew = Crew(asker.folder, indices, lambda index: _Forked(asker.folder, task, index), task.jobs, task.timeout)
    while crew.tend():
        if asker.has_ended(TICK):
            asker.follow()


class _Asker:
    """The process that started this one. Whatever is printed from here on goes nowhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pipe = os.dup(0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        sys.stdin = open(os.devnull, encoding="utf-8")
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="replace")

    def has_ended(self, wait: float) -> bool:
        """Wait at most ``wait`` seconds for its end; tell whether it has ended. Not on Windows."""
        return bool(select.select([self._pipe], [], [], wait)[0])

    def wait_for_its_end(self) -> None:
        """Follow the asker when it ends; runs in a thread."""
        os.read(self._pipe, 1)
        self.follow()

    def follow(self) -> None:
        """End this process too, with all that it has started."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if sys.platform != "win32":
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


class _Forked:
    """A copy of this process that answers one question."""

    def __init__(self, folder: Path, task: Task, index: int) -> None:
        self._code: int | None = None
        self._pid = os.fork()
        if not self._pid:
            _answer(folder, task, index)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def close(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _preload(task: Task, asker: _Asker) -> bool:
    """Import the modules that the children have in common; tell whether they may be forked then."""
    done = threading.Event()

    def watch() -> None:
        late = time.monotonic() + task.timeout
        while not done.wait(0.1):
            if asker.has_ended(0):
                asker.follow()
            if time.monotonic() > late:
                os._exit(1)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for name in (*task.preload, task.function.partition(":")[0]):
            with contextlib.suppress(Exception):  # then each child that needs it says so
                importlib.import_module(name)
            if _has_accelerator():
                return False
        if task.prepare:
            with contextlib.suppress(Exception):  # as above
                pkgutil.resolve_name(task.prepare)()
        gc.freeze()  # else each child walks over all of it again and again, and gets pages of its own by that
        return True
    finally:
        done.set()
        watching.join()  # who forks has one thread


def _has_accelerator() -> bool:
    """CUDA and its like do not survive a fork."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available())


def _answer(folder: Path, task: Task, index: int) -> None:
    """Never returns: nothing of the process that was forked may go on."""
    code = 1
    try:
        write_answer(folder, index, _called(task.function, task.questions[index]))
        code = 0
    finally:
        os._exit(code)


def _called(function: str, question: Sequence[str]) -> Answer:
    try:
        answer: Answer = pkgutil.resolve_name(function)(*question)
        return answer
    except BaseException as error:  # SystemExit as well: a reproducer that leaves has not answered
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno}"
        return None, f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:300]}"
