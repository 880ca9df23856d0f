"""The train step of TRL's trainers on quantized models: one graph, and the losses of eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from patches.engine import gate
from tests.processor import ROOT

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("trl", reason="TRL is not installed, nor what it needs (datasets, with pyarrow and pandas)")
pytestmark = pytest.mark.skipif(not gate.satisfied("trl>=1.16"), reason="TRL before 1.16 has another head")


def train(*arguments: str) -> dict:
    """What train.py prints, from a process of its own."""
    command = [sys.executable, str(ROOT / "tests" / "repairs" / "trl" / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=280)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("options", [
    ("sft", "4"), ("sft", "8"), ("sft", "4", "dora"), ("sft", "8", "dora"), ("sft", "4", "completion"), ("dpo", "4"),
], ids=" ".join)  # fmt: skip
def test_one_graph_with_the_losses_of_eager(options):
    answer = train(*options)
    assert answer["graphs"] == 1
    assert answer["compiled"] == answer["eager"]
    assert len(set(answer["eager"]["loss"])) == 4, "it learns"


def test_packed_rows_of_any_length():
    """Each step has another length: whole graphs still, made again for the first lengths that come."""
    answer = train("sft", "4", "packing")
    assert answer["graphs"] <= 3
    assert answer["compiled"] == answer["eager"]


def test_several_graphs_without_the_patches():
    assert train("sft", "4", "unpatched")["graphs"] > 1
