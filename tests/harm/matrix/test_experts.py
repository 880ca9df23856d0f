"""Quantized experts are never worse than experts in floating point, whatever is done to them and whatever reads them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.10", reason="functional.grouped_mm is one of the readers")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from patches.engine import gate  # noqa: E402
from patches.experts.packed_experts import PackedExperts  # noqa: E402
from tests.harm.matrix import experts  # noqa: E402
from tests.harm.matrix.judge_experts import worse  # noqa: E402

EVERY = 6
"""Each change meets every sixth reader each day, and another sixth than the change before it."""


@pytest.fixture(autouse=True)
def kept_warnings():
    import logging

    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", ["nf4-nested", "int8"])
def test_a_slice(kind):
    found = {}
    for number, change in enumerate(experts.CHANGES):
        readers = dict(list(experts.READERS.items())[number % EVERY :: EVERY])
        found.update({(change, reader): why for reader, why in worse(kind, change, readers).items()})
    assert not found


@pytest.mark.release("test_a_slice")
@pytest.mark.parametrize("change", experts.CHANGES)
@pytest.mark.parametrize("kind", experts.KINDS)
def test_the_product(kind, change):
    if kind.startswith("fp4") and not gate.satisfied("bitsandbytes>=0.47"):
        pytest.skip("0.46 has no FP4 kernel for the CPU")
    assert not worse(kind, change)


def test_wrong_numbers_are_seen(monkeypatch):
    right = PackedExperts.dequantize
    monkeypatch.setattr(PackedExperts, "dequantize", lambda self, *args: 1.1 * right(self, *args))
    found = worse("nf4", "nothing", {"forward": experts.READERS["forward"]})
    assert found == {"forward": "off by 1.0e-01"}


def test_unclear_errors_are_seen(monkeypatch):
    def fails(self, *args):
        raise AttributeError("code")

    monkeypatch.setattr(PackedExperts, "dequantize", fails)
    found = worse("nf4", "nothing", {"forward": experts.READERS["forward"]})
    assert found == {"forward": "unclear error: AttributeError('code')"}
