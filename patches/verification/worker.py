"""What runs in the processes that :mod:`.processes` starts, and what looks after them.

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
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

Answer = tuple[bool | None, str]
"""Whether the defect is there (None: no answer) and the figure, or why there is no answer."""

TICK = 0.01
"""Seconds between two looks at the processes that run."""


@dataclass(frozen=True)
class Asked:
    """Everything that a worker must know."""

    function: str
    """``module:name``; called with one of ``questions``, it returns an answer."""
    questions: Sequence[Sequence[str]]
    preload: Sequence[str]
    """Modules that the fork server imports, once for all."""
    prepare: str
    """``module:name``, called there once, after them; empty for none."""
    jobs: int
    timeout: float
    """Seconds that one question may take, and that the preloading may take."""

    def write(self, folder: Path) -> None:
        (folder / "asked").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Asked:
        return cls(**json.loads((folder / "asked").read_text()))


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
        """Its exit code, negative for a signal; None while it runs."""

    def end(self) -> None:
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
        """Look after the children once: start, answer for each that died or takes too long. False at the end."""
        for index, (child, deadline) in list(self._running.items()):
            code = child.poll()  # before the look at the file, which comes first
            if not (self._folder / f"{index}.json").exists():
                if code is None and time.monotonic() < deadline:
                    continue
                write_answer(
                    self._folder,
                    index,
                    (None, f"no answer in {self._timeout:.0f} s" if code is None else describe_exit(code)),
                )
            child.end()
            del self._running[index]
        while self._waiting and len(self._running) < self._jobs:
            index = self._waiting.pop(0)
            self._running[index] = self._start(index), time.monotonic() + self._timeout
        return bool(self._running)

    def close(self) -> None:
        """End all that run."""
        for child, _ in self._running.values():
            child.end()


def describe_exit(code: int) -> str:
    """In words, how a process ended that gave no answer."""
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
    _answer(asker.folder, Asked.read(asker.folder), index)


def serve_questions(folder: str) -> None:
    """Import once, then fork a process for each question. Where a fork is not possible, end without an answer."""
    asker = _Asker(Path(folder))
    asked = Asked.read(asker.folder)
    if not _preload(asked, asker):
        return
    indices = range(len(asked.questions))
    crew = Crew(asker.folder, indices, lambda index: _Forked(asker.folder, asked, index), asked.jobs, asked.timeout)
    while crew.tend():
        if asker.gone(TICK):
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

    def gone(self, wait: float) -> bool:
        """Whether it ends in the next ``wait`` seconds, or has ended. Not on Windows."""
        return bool(select.select([self._pipe], [], [], wait)[0])

    def wait_for_its_end(self) -> None:
        """For a thread."""
        os.read(self._pipe, 1)
        self.follow()

    def follow(self) -> None:
        """End as well, with all that we have started."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if sys.platform != "win32":
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


class _Forked:
    """A copy of this process that answers one question."""

    def __init__(self, folder: Path, asked: Asked, index: int) -> None:
        self._code: int | None = None
        self._pid = os.fork()
        if not self._pid:
            _answer(folder, asked, index)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def end(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _preload(asked: Asked, asker: _Asker) -> bool:
    """Import what the children have in common; whether they may be forked then."""
    done = threading.Event()

    def watch() -> None:
        late = time.monotonic() + asked.timeout
        while not done.wait(0.1):
            if asker.gone(0):
                asker.follow()
            if time.monotonic() > late:
                os._exit(1)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for name in (*asked.preload, asked.function.partition(":")[0]):
            with contextlib.suppress(Exception):  # then each child that needs it says so
                importlib.import_module(name)
            if _has_accelerator():
                return False
        if asked.prepare:
            with contextlib.suppress(Exception):  # as above
                _named(asked.prepare)()
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


def _answer(folder: Path, asked: Asked, index: int) -> None:
    """Never returns: nothing of the process that was forked may go on."""
    code = 1
    try:
        write_answer(folder, index, _called(asked.function, asked.questions[index]))
        code = 0
    finally:
        os._exit(code)


def _named(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _called(function: str, question: Sequence[str]) -> Answer:
    try:
        answer: Answer = _named(function)(*question)
        return answer
    except BaseException as error:  # SystemExit as well: a reproducer that leaves has not answered
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno}"
        return None, f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:300]}"
