"""Runs the cases about the scales of blocks on each processor that this host can offer."""

from __future__ import annotations

from pathlib import Path

from tests.processor import cases


@cases.PROCESSORS
def test_on_a_processor_with_avx512(pytestconfig, kind):
    cases.run(pytestconfig, kind, Path(__file__).with_name("cases_dequantize_wrong_scales.py"))
