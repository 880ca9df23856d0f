"""Runs :mod:`.cases_cpu_repack` on each processor that this host can offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bitsandbytes
import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("cases_cpu_repack.py")


@pytest.mark.parametrize("processor", ["emulated", "real"])
def test_on_a_processor_with_avx512bf16(processor):
    """``emulated`` stands in for the instruction, not for the library: see :mod:`tests.avx512bf16`."""
    if Version(bitsandbytes.__version__) < Version("0.49"):
        pytest.skip("before 0.49 bitsandbytes does not repack")
    if processor == "real" and not bitsandbytes.functional.has_avx512bf16():
        pytest.skip("this processor has no AVX512-BF16")
    plugin = ["-p", "tests.avx512bf16"] if processor == "emulated" else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugin, "-p", "no:cacheprovider", str(CASES)]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
