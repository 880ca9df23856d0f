"""The programs about 4-bit weights once more, on a processor where an eval forward repacks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.engine import gate
from tests import processor

CATALOGUE = Path(__file__).with_name("test_catalogue.py")


def test_on_a_processor_with_avx512bf16() -> None:
    """In a process of its own, for bitsandbytes asks its processor once; see :mod:`tests.processor`."""
    if not gate.satisfied("bitsandbytes>=0.49"):
        pytest.skip("before 0.49 bitsandbytes does not ask the processor")
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", str(CATALOGUE)]
    env = {**os.environ, processor.VARIABLE: processor.WITH_AVX512BF16}
    done = subprocess.run(command, cwd=processor.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
