"""An accelerator that is simulated, so that on any machine tensors really move.

On a CPU the device that a model runs on is where everything is: an offloaded layer that forgets to come back, or a
scale left behind, computes all the same. Here are two devices whose memory is apart, in a library of our own
(``native``). Their kernels are those of the CPU, so that results are equal to the bit; but they refuse operands of two
devices, and every kernel, copy and wait is logged, and their memory counted and limited (:mod:`.watch`).

They come in two forms, in the variable :data:`VARIABLE`:

- ``cuda`` poses as CUDA in a build of torch without it: what upstream does for ``device.type == "cuda"`` is done;
- ``sim`` is a backend that torch knows nothing of (PrivateUse1), as those of other vendors are.

With the variable set, the ``device`` fixture of the whole suite gives this device in place of "cpu", for all but what
Inductor compiles. What is made for it is in ``cases_*.py``, which ``test_cases.py`` runs, in processes of their own::

    PATCHES_TEST_DEVICE=cuda python -m pytest tests/device/cases_offload.py

What it cannot show: anything of speed, the kernels of bitsandbytes for GPUs, and races, for all is done in order.
Only a copy to pinned memory that nobody waited for is not there yet.
"""

from __future__ import annotations

import ctypes
import os
import sys

VARIABLE = "PATCHES_TEST_DEVICE"
KINDS = ("cuda", "sim")


def kind() -> str:
    """Which form this process has; empty if none."""
    return os.environ.get(VARIABLE, "")


def pretend(kind: str) -> None:
    """Give this process the device, as one of :data:`KINDS`. Before torch is imported, which asks for devices."""
    if kind not in KINDS:
        raise ValueError(f"{VARIABLE}={kind!r}: it can be {', '.join(KINDS)}")
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already and has asked which devices there are")
    from . import build

    libraries = build.torch_folder() / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(build.library()), mode=ctypes.RTLD_GLOBAL).start(kind == "cuda")
    import bitsandbytes  # noqa: F401  before there is a "cuda", for which it would look for a library

    from . import frontend, operators

    frontend.install(kind)
    operators.register(kind)
