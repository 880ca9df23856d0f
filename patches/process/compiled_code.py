"""Having torch.compile forget the graphs of code that was changed, when that is safe.

Dynamo does not guard on the code of methods of ``nn.Module``, so a graph that was made of the old code would run
on. ``torch.compiler.reset()`` is the only way to tell it; but it frees what another thread may be running (torch
itself can crash), and it waits for a compilation in progress, which in turn may wait for the import that we are
in. So it is called only where no thread is inside torch's compiler or in code that it made.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import CodeType, ModuleType

from ..engine.frames import globals_and_code_of_frames

FORGOTTEN = "torch.compiler.reset() was called: compiled code is compiled again at its next use"
_MACHINERY = ("_dynamo", "_functorch", "_inductor")
_WAITING_THREADS = "compile_worker"  # of Inductor: they live as long as the process and hold nothing


def forget_compiled_code() -> str | None:
    """Reset the compiler if something was compiled. Return a message: empty if nothing was, None if it cannot be done now."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or getattr(dynamo.__spec__, "_initializing", False) or not _used(dynamo):
        return ""
    import torch

    if any(_is_machinery(code) for _, code in globals_and_code_of_frames()):
        return None
    torch.compiler.reset()
    return FORGOTTEN


def _used(dynamo: ModuleType) -> bool:
    """Tell whether Dynamo has seen a frame."""
    return any(dynamo.utils.counters.values()) or bool(dynamo.convert_frame.input_codes.seen)


def _is_machinery(code: CodeType) -> bool:
    path = PurePath(code.co_filename).parts
    if "torch" not in path or _WAITING_THREADS in path:
        return False
    return any(folder in path for folder in _MACHINERY)
