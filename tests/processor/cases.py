"""Running test files on a processor that is not this process': bitsandbytes asks for it once, at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bitsandbytes
import pytest
from packaging.version import Version

from tests import processor

PROCESSORS = pytest.mark.parametrize("kind", ["emulated", "host"])
"""``emulated`` stands in for the instruction, not for the library: see :mod:`tests.processor`."""


def run(kind: str, *files: Path) -> None:
    """Run the tests in ``files``, which are not collected by themselves, on the processor ``kind``."""
    if Version(bitsandbytes.__version__) < Version("0.49"):
        pytest.skip("before 0.49 bitsandbytes has no kernels for AVX512")
    if kind == "host" and not processor.host_has_avx512bf16():
        pytest.skip("this processor has no AVX512-BF16")
    if kind == "emulated" and processor.host_has_avx512bf16() and Version(bitsandbytes.__version__) < Version("0.50"):
        pytest.skip("this processor has AVX512-BF16: the emulation is run beside it on the newest series only")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    env = {**os.environ, processor.VARIABLE: kind}
    done = subprocess.run(command, cwd=processor.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
