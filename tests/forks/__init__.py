"""Programs in processes that begin with torch and transformers imported: forks of a server that did so once.

Importing is what short programs spend their time with: eight seconds of a processor each on a busy machine, half a
second here. bitsandbytes and peft are not imported before, so what begins with their import (the entry point among
them) begins in the program, as in a new process. What is about the start of a process, or about how programs are
launched, starts real ones; so does every test where there is an accelerator, whose runtime no fork survives.

A process asks the server that :data:`VARIABLE` names, if that imported the same packages, else one of its own. On one
connection it sends a JSON line for each group of programs and gets one back: their exit codes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "PATCHES_TEST_FORKS"
"""The socket of a server that several processes share."""
PACKAGES = ("accelerate", "huggingface_hub", "torch", "transformers")
"""What the server has imported modules of, and must have from where the program would."""
TIMED_OUT = 124


@dataclass(frozen=True)
class Program:
    """What ``python ARGUMENTS`` would run: a file and its arguments, or "-c", source and arguments."""

    arguments: Sequence[str]
    environ: Mapping[str, str]
    """All of it."""
    folder: str = field(default_factory=os.getcwd)
    out: str = ""
    """Where its output and errors go; a file of the caller."""


def run(*programs: Program, timeout: float) -> list[subprocess.CompletedProcess[str]]:
    """Run them at the same time, in processes of their own; when one fails, the others are killed."""
    return _run(_connection().ask if _can_fork() else _run_new, programs, timeout)


def pytest_program(*arguments: str, **environ: str) -> Program:
    """What ``pytest ARGUMENTS`` would run, with these variables and those of this process."""
    return Program(["-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *arguments], {**os.environ, **environ},
                   str(Path(__file__).parents[2]))  # fmt: skip


def _run(
    ask: Callable[[Sequence[Program], float], list[int]], programs: Sequence[Program], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    """What programs said, of which ``ask`` gives the exit codes."""
    with tempfile.TemporaryDirectory() as name:
        outs = [os.path.join(name, str(number)) for number in range(len(programs))]
        started = [Program(p.arguments, p.environ, p.folder, out) for p, out in zip(programs, outs)]
        codes = ask(started, timeout)
        said = [[Path(f"{out}.{end}").read_text(errors="replace") for end in ("out", "err")] for out in outs]
    return [subprocess.CompletedProcess(list(p.arguments), code, *texts)
            for p, code, texts in zip(programs, codes, said)]  # fmt: skip


@functools.cache
def _can_fork() -> bool:
    """Whether the server has no accelerator."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


def _run_new(programs: Sequence[Program], timeout: float) -> list[int]:
    """In interpreters of their own, one after the other or, if there are several, at once."""
    with contextlib.ExitStack() as stack:
        running = []
        for program in programs:
            out, err = (stack.enter_context(open(f"{program.out}.{end}", "wb")) for end in ("out", "err"))
            running.append(subprocess.Popen([sys.executable, *program.arguments], env=dict(program.environ),
                                            cwd=program.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                            start_new_session=True))  # fmt: skip
        return watch([process.pid for process in running], timeout)


def watch(pids: Sequence[int], timeout: float, gone: Callable[[], bool] = lambda: False) -> list[int]:
    """The exit codes of children that each lead a process group; all are killed when one fails or time is up.

    They are, too, when ``gone`` says that nobody waits for them any more.
    """
    codes: dict[int, int] = {}
    late = time.monotonic() + timeout
    try:
        while len(codes) < len(pids) and time.monotonic() < late and not any(codes.values()) and not gone():
            for pid in set(pids) - codes.keys():
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
    finally:
        for pid in set(pids) - codes.keys():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [codes.get(pid, TIMED_OUT) for pid in pids]


# -- the server ----------------------------------------------------------------------------------


def origins() -> dict[str, str | None]:
    """The files that the packages begin with, where they are installed. Nothing is imported."""
    return {name: spec and spec.origin for name in PACKAGES for spec in [find_spec(name)]}


class Server:
    """A process that answers at :attr:`address`; it ends with this process, when its standard input does."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bnb-patches-forks-")  # nobody else may enter it
        self.address = os.path.join(self._folder.name, "socket")
        own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        with socket.socket(socket.AF_UNIX) as listener, open(said_by(self.address), "wb") as said:
            listener.bind(self.address)
            listener.listen(64)  # from here on a client can connect, and waits for the imports
            command = [sys.executable, "-m", f"{__name__}.server", str(listener.fileno())]
            self._process = subprocess.Popen(command, env={**environ, **own}, stdin=subprocess.PIPE, stdout=said,
                                             stderr=said, pass_fds=[listener.fileno()])  # fmt: skip


def said_by(address: str) -> Path:
    """What libraries print when the server imports them, and why it has ended."""
    return Path(address).with_name("said")


class Connection:
    """What one process asks a server by."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._file = self._socket.makefile("rw")
        self.has: dict[str, str | None] = json.loads(self._read())

    def run(self, *programs: Program, timeout: float) -> list[subprocess.CompletedProcess[str]]:
        """As :func:`run`, by this connection."""
        return _run(self.ask, programs, timeout)

    def ask(self, programs: Sequence[Program], timeout: float) -> list[int]:
        """Their exit codes."""
        self.send(programs, timeout)
        codes: list[int] = json.loads(self._read())
        return codes

    def send(self, programs: Sequence[Program], timeout: float) -> None:
        """Have them started."""
        print(json.dumps([[asdict(p) for p in programs], timeout]), file=self._file, flush=True)

    def close(self) -> None:
        """End what runs, without an answer."""
        self._file.close()
        self._socket.close()

    def _read(self) -> str:
        answer = ""
        with contextlib.suppress(ConnectionError):
            answer = self._file.readline()
        if not answer:
            raise RuntimeError(f"the server of {__name__} has ended\n{said_by(self.address).read_text()}")
        return answer


@functools.cache
def _connection() -> Connection:
    """One for this process, whose groups of programs run one after the other."""
    return shared(os.environ) or Connection(_own().address)


def shared(environ: Mapping[str, str]) -> Connection | None:
    """To the server that ``environ`` names, if it has the packages that this process would import."""
    if VARIABLE not in environ:
        return None
    found = Connection(environ[VARIABLE])
    if found.has == origins():
        return found
    found.close()
    return None


@functools.cache
def _own() -> Server:
    from tests.conftest import _ENVIRON

    return Server(_ENVIRON)
