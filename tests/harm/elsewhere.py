"""Another process, which has bitsandbytes and not the plugin, and reads what a program has saved.

One such process serves all programs: to start one takes seconds. Run as a script, this file is that process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
from typing import IO, Any

_FUNCTIONS = ("run_exported",)
_process: subprocess.Popen[bytes] | None = None


class NotReadable(RuntimeError):
    """The other process raised; says what."""


def call(function: str, *arguments: Any) -> Any:
    """The result of a function of this file, called in the other process; what it raises is ``NotReadable``."""
    global _process
    if _process is None or _process.poll() is not None:
        env = {**os.environ, "PATCHES_AUTOLOAD": "0"}
        _process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, env=env)  # fmt: skip
        atexit.register(_process.kill)
    assert _process.stdin is not None and _process.stdout is not None
    pickle.dump((function, arguments), _process.stdin)
    _process.stdin.flush()
    try:
        result, error = pickle.load(_process.stdout)
    except EOFError:
        raise NotReadable(f"the other process ended with {_process.wait()}") from None
    if error:
        raise NotReadable(error)
    return result


def run_exported(path: str, inputs: list[Any]) -> list[Any]:
    """The output of the exported program in the file ``path`` for each of ``inputs``."""
    import torch

    module = torch.export.load(path).module()
    with torch.no_grad():
        return [module(x).detach().clone() for x in inputs]


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    for name in ("patches", "bnb_patches"):  # the entry point does nothing with PATCHES_AUTOLOAD=0
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    import bitsandbytes  # noqa: F401, its operators

    while True:
        function, arguments = pickle.load(requests)
        try:
            assert function in _FUNCTIONS
            answer = globals()[function](*arguments), ""
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.path.pop(0)  # this folder
    with contextlib.suppress(EOFError):
        _serve(sys.stdin.buffer, out)
