"""The process that programs are forked from: ``python -m tests.forks.server DESCRIPTOR``, of a socket that listens."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from weakref import finalize

from tests import compiling, processor
from tests.forks import Program, origins, watch

PRELOAD = ("torch", "torch._inductor.compile_fx", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
           "transformers", "transformers.modeling_utils", "transformers.generation", "accelerate",
           "transformers.models.bloom.modeling_bloom", "huggingface_hub.hf_file_system")  # fmt: skip


def serve(listener: socket.socket) -> None:
    """Import, then fork a process for each connection, which forks the programs, until standard input ends."""
    for name in PRELOAD:
        importlib.import_module(name)
    compiling.without_figures()
    early = [name for name in ("bitsandbytes", "peft", "patches", "bnb_patches") if name in sys.modules]
    assert not early, f"{early} are for the programs to import"
    for each in finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # half of what a short program would do is to take down the operators of these imports
    gc.collect()
    gc.freeze()
    while listener in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            try:
                _answer(connection)
            finally:
                os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those whose clients are gone
                pass


def _no_fork_survives() -> dict[str, str]:
    """The runtime of an accelerator, where there is one."""
    import torch

    return {"cuda": str(torch.version.cuda)} if torch.cuda.is_available() else {}


def _answer(connection: socket.socket) -> None:
    def gone() -> bool:  # nothing is asked before the last answer
        return bool(select.select([connection], [], [], 0)[0])

    with connection.makefile("rw") as file:
        print(json.dumps({**origins(), **_no_fork_survives()}), file=file, flush=True)
        for line in file:
            programs, timeout = json.loads(line)
            pids = [_fork(Program(**program), timeout) for program in programs]
            print(json.dumps(watch(pids, timeout, gone)), file=file, flush=True)


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
    serve(socket.socket(fileno=int(sys.argv[1])))
