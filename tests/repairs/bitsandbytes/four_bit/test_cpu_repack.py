"""Runs the cases about packed weights on each processor that this host can offer."""

from __future__ import annotations

from pathlib import Path

from tests.processor import cases


@cases.PROCESSORS
def test_on_a_processor_with_avx512bf16(pytestconfig, kind):
    files = sorted(Path(__file__).parent.glob("cases_cpu_repack_*.py"))
    assert len(files) == 5
    cases.run(pytestconfig, kind, *files)
