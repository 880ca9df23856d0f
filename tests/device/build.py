"""Builds the library of the device, once for all processes and releases that have the same sources and torch.

It lies in the folder for temporary files, named by a digest of all that it is made of.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

NATIVE = Path(__file__).with_name("native")
FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-DAT_PER_OPERATOR_HEADERS")


class CannotBuild(Exception):
    """There is nothing here to build it with; the message says what is missing."""


def torch_folder() -> Path:
    """Where torch lies, found without importing it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotBuild("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def compiler() -> str:
    """The C++ compiler, looked for as Inductor does."""
    if sys.platform != "linux":
        raise CannotBuild("the simulated device was made for Linux")
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild("this build of torch has CUDA, whose place the simulated device would take")
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise CannotBuild(f"there is no C++ compiler: {wanted!r} is not on the path, and CXX names no other")
    return found


def library() -> Path:
    """The library, built if nobody has built this one yet; about 10 s of processor time."""
    torch, cxx = torch_folder(), compiler()
    import fcntl  # only where compiler() found what it asks for

    sources = sorted(NATIVE.iterdir())
    parts = (cxx, *FLAGS, str(torch), (torch / "version.py").read_text(), *(path.read_text() for path in sources))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"bnb-patches-device-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{digest}.so"
    with open(folder / f"{digest}.lock", "w") as lock:  # two workers of one run would both build it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(cxx, torch, built)
    return built


def _compile(cxx: str, torch: Path, built: Path) -> None:
    half = built.with_suffix(".part")
    paths = (f"-I{torch}/include", f"-L{torch}/lib", "-ltorch_cpu", "-lc10")
    command = [cxx, *FLAGS, str(NATIVE / "device.cpp"), "-o", str(half), *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-4000:]}")
    half.rename(built)  # so that what has the name is whole
