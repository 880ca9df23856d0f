"""The programs about 4-bit weights once more, on a processor where an eval forward repacks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.engine import gate
from tests import processor
from tests.processor import cases

CATALOGUE = Path(__file__).with_name("test_catalogue.py")


def test_on_a_processor_with_avx512bf16(pytestconfig: pytest.Config) -> None:
    """In a process of its own, for bitsandbytes asks its processor once; see :mod:`tests.processor`."""
    if not gate.satisfied("bitsandbytes>=0.49"):
        pytest.skip("before 0.49 bitsandbytes does not ask the processor")
    chosen = ("-m", pytestconfig.getoption("markexpr")) if pytestconfig.getoption("markexpr") else ()
    done = cases.pytest_on(processor.WITH_AVX512BF16, "-q", "-rfE", *chosen, str(CATALOGUE))
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
