"""How many functions a healthy eager layer calls: a call too many is paid in each layer of each step.

Counted, never timed. Who needs another call there raises a limit here, and says what it costs in ``docs/speed.md``.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch

import patches
from benchmarks import counts
from patches.engine import gate


def layer(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "INT8":
        made: Any = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0)
    else:
        made = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32,
                                 compress_statistics=kind == "double")  # fmt: skip
    return made.to("cpu").requires_grad_(False).train()


def called(kind: str, backward: bool) -> dict[str, int]:
    made, x = layer(kind), torch.randn(4, 64, requires_grad=backward)

    def step() -> None:
        y = made(x)
        if backward:
            y.sum().backward()

    for _ in range(3):  # the first forward moves scales, and imports
        step()
    return counts.functions(step)


@pytest.mark.skipif(not gate.satisfied("bitsandbytes>=0.50"), reason="before 0.50 its own functions call others")
@pytest.mark.parametrize(
    ("kind", "backward", "ours", "more"),
    [
        ("plain", False, 2, -2),
        ("plain", True, 4, 2),
        ("double", False, 2, -2),
        ("double", True, 4, 2),
        ("INT8", False, 1, 3),
        ("INT8", True, 2, 4),
    ],
)
def test_a_healthy_layer_calls_few_functions(kind, backward, ours, more):
    """``ours`` are of the plugin, and ``more`` all of Python that it adds, two of them for each look whether Dynamo traces."""
    before = called(kind, backward)
    with patches.applied():
        now = called(kind, backward)
    assert before["ours"] == 0
    assert now["ours"] <= ours
    assert now["python"] - before["python"] <= more
