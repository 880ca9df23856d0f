"""Runs :mod:`.cases_cpu_repack` on each processor that this host can offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bitsandbytes
import pytest
from packaging.version import Version

from tests import processor

CASES = Path(__file__).with_name("cases_cpu_repack.py")


@pytest.mark.parametrize("kind", ["emulated", "host"])
def test_on_a_processor_with_avx512bf16(kind):
    """``emulated`` stands in for the instruction, not for the library: see :mod:`tests.processor`."""
    if Version(bitsandbytes.__version__) < Version("0.49"):
        pytest.skip("before 0.49 bitsandbytes does not repack")
    if kind == "host" and not processor.host_has_avx512bf16():
        pytest.skip("this processor has no AVX512-BF16")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    env = {**os.environ, processor.VARIABLE: kind}
    done = subprocess.run(command, cwd=processor.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
