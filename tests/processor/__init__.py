"""The processor that the suite runs on, whatever the host has.

On a processor with AVX512-BF16 bitsandbytes 0.49 and later repacks 4-bit weights in an eval forward, a defect
with a patch of its own (``bitsandbytes-cpu-repack``). A test of any other patch, alone, would meet it there and
not elsewhere. So a test says which processor it is about, in the variable :data:`VARIABLE`:

- ``plain``, the default of the suite: one without the instruction, and without AVX512F, on which 4-bit weights of
  some widths are dequantized with wrong scales (``bitsandbytes-dequantize-wrong-scales``, :mod:`.avx512f`);
- ``emulated``: one that has both, the two kernels of AVX512-BF16 computed by :mod:`.avx512bf16`, to bfloat16 rounding;
- ``host``: whatever is there. :data:`WITH_AVX512BF16` is this where the host has the instruction, else the emulation.

bitsandbytes asks its native library once, at import, so :func:`pretend` must come first. In this process the
suite's ``conftest.py`` calls it; in every process that a test starts, ``sitecustomize.py`` in this folder does,
which is on their ``PYTHONPATH``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from . import avx512f

VARIABLE = "PATCHES_TEST_PROCESSOR"
ROOT = Path(__file__).parents[2]
KINDS = ("plain", "emulated", "host")


def host_has_avx512bf16() -> bool:
    """Whether this machine has the instruction, as the kernel tells."""
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


WITH_AVX512BF16 = "host" if host_has_avx512bf16() else "emulated"


_pretended = ""
_load = ctypes.cdll.LoadLibrary


def pretend(kind: str) -> None:
    """Give the bitsandbytes that is imported next the processor ``kind``, one of :data:`KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"{VARIABLE}={kind!r}: it can be {', '.join(KINDS)}")
    global _pretended
    if kind == _pretended:
        return
    if "bitsandbytes" in sys.modules:
        raise RuntimeError("bitsandbytes is imported already and has asked the processor")
    _pretended = kind

    def load_library(name: str) -> Any:
        library = _load(name)
        if kind == "host" or not Path(name).name.startswith("libbitsandbytes"):
            return library
        if kind == "plain":
            return _Answering(library, 0, avx512f.kernels(library, present=False))
        from .avx512bf16 import KERNELS  # not before: it needs torch

        return _Answering(library, 1, {**KERNELS, **avx512f.kernels(library, present=True)})

    ctypes.cdll.LoadLibrary = load_library


def path_for_children() -> str:
    """The ``PYTHONPATH`` with which a new process finds what this one finds, and obeys :data:`VARIABLE`."""
    folders = (str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT))
    return os.pathsep.join(dict.fromkeys(filter(None, folders)))


class _Answering:
    """The native library, on a processor that has the instructions or has not."""

    def __init__(self, library: ctypes.CDLL, answer: int, kernels: dict[str, Any]) -> None:
        self._library = library
        for question in ("has_avx512bf16_cpu", "has_avx512f_cpu"):
            if hasattr(library, question):  # older ones do not ask
                setattr(self, question, lambda: answer)
        vars(self).update(kernels)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)
