"""Programs in processes that begin with torch and transformers imported: forks of a server that did so once.

Importing is what short programs spend their time with: eight seconds of a processor each on a busy machine, half a
second here. bitsandbytes and peft are not imported before, so what begins with their import (the entry point among
them) begins in the program, as in a new process. What is about the start of a process, or about how programs are
launched, starts real ones; so does every test where there is an accelerator, whose runtime no fork survives.

The server reads a JSON line for each group of programs and answers with one: their exit codes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests import compiling, processor

PRELOAD = ("torch", "torch._inductor.compile_fx", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
           "transformers", "transformers.modeling_utils", "transformers.generation", "accelerate",
           "transformers.models.bloom.modeling_bloom", "huggingface_hub.hf_file_system")  # fmt: skip
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
    with tempfile.TemporaryDirectory() as name:
        outs = [os.path.join(name, str(number)) for number in range(len(programs))]
        started = [Program(p.arguments, p.environ, p.folder, out) for p, out in zip(programs, outs)]
        codes = _server().ask(started, timeout) if _can_fork() else _run_new(started, timeout)
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
        return _watch([process.pid for process in running], timeout)


def _watch(pids: Sequence[int], timeout: float) -> list[int]:
    """The exit codes of children that each lead a process group; all are killed when one fails or time is up."""
    codes: dict[int, int] = {}
    late = time.monotonic() + timeout
    try:
        while len(codes) < len(pids) and time.monotonic() < late and not any(codes.values()):
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


# -- the server --------------------------------------------------------------------------------


class _Server:
    def __init__(self) -> None:
        from tests.conftest import _ENVIRON

        env = {**_ENVIRON, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        self._said = tempfile.TemporaryFile()  # what libraries print when they are imported
        self._process = subprocess.Popen([sys.executable, "-m", __name__], env=env, text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=self._said)  # fmt: skip

    def ask(self, programs: Sequence[Program], timeout: float) -> list[int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([[asdict(p) for p in programs], timeout]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._said.seek(0)
            raise RuntimeError(f"the server of {__name__} has ended with {self._process.wait()}\n{self._said.read()!r}")
        codes: list[int] = json.loads(answer)
        return codes


@functools.cache
def _server() -> _Server:
    """It ends with this process: when its standard input does."""
    return _Server()


def serve() -> None:
    import gc

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in PRELOAD:
        importlib.import_module(name)
    compiling.without_figures()
    early = [name for name in ("bitsandbytes", "peft", "patches", "bnb_patches") if name in sys.modules]
    assert not early, f"{early} are for the programs to import"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        programs, timeout = json.loads(line)
        pids = [_fork(Program(**program), timeout) for program in programs]
        print(json.dumps(_watch(pids, timeout)), file=answers, flush=True)


def _fork(program: Program, timeout: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        code = _run_here(program, timeout)
    finally:
        os._exit(code)


def _run_here(program: Program, timeout: float) -> int:
    """Become ``program``; its exit code. It says where it stands shortly before its time is up."""
    import atexit
    import faulthandler
    import threading
    import traceback

    for descriptor, path in enumerate((os.devnull, f"{program.out}.out", f"{program.out}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.dump_traceback_later(0.95 * timeout, file=2)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environ)
    processor.pretend(os.environ.get(processor.VARIABLE, "host"))
    code = 1
    try:
        _become(program.arguments)
        code = 0
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _become(arguments: Sequence[str]) -> None:
    import runpy
    from types import ModuleType

    first = "" if arguments[0] == "-c" else os.path.dirname(os.path.abspath(arguments[0]))
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = sys.path[1:]  # the first is the folder that the server was started in
    sys.path[:] = [first, *paths, *(path for path in known if path not in paths)]
    importlib.invalidate_caches()
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        import torch

        torch._import_device_backends()  # type: ignore[attr-defined]  # what the import of torch ends with
    if arguments[0] != "-c":
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv[:] = ["-c", *arguments[2:]]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), vars(main))


if __name__ == "__main__":
    serve()
