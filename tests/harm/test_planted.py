"""The catalogue finds harm: patches made to do it, each planted beside ours, and what it says of them.

Each breaks the rule in one way that a repair may, and is blamed by programs that know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

from patches import REGISTRY
from patches.engine import Finding, Patch, SetAttribute

from . import reach
from .test_catalogue import CASES
from .verdicts import Judged, Verdicts

ID = "bitsandbytes-planted"
Call = Callable[[Any, torch.Tensor], torch.Tensor]


def unchanged(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Module.__call__(layer, x)


def kept_by_version(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Dequantizes once; a write that no version counter tells of goes unseen."""
    key = layer.weight._version
    if layer.__dict__.get("_planted", (None,))[0] != key:
        layer.__dict__["_planted"] = key, dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return torch.nn.functional.linear(x, layer.__dict__["_planted"][1].to(x.dtype), layer.bias)


def more_exactly(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state).double()
    return torch.nn.functional.linear(x.double(), weight, layer.bias).to(x.dtype)


def what_upstream_refuses(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.Module.__call__(layer, x[..., : layer.in_features])


def not_a_single_row(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if x.numel() == layer.in_features:
        raise ValueError("the repair is for two rows or more: give it two")
    return torch.nn.Module.__call__(layer, x)


def planted(call: Call) -> Patch:
    return Patch(
        id=ID,
        summary="",
        links=(),
        requires=("bitsandbytes>=0.46",),
        tested_up_to="99",
        edits=(SetAttribute("bitsandbytes.nn.modules:Linear4bit.__call__", make=lambda original: call),),
        defect=lambda: Finding(present=False),
    )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Call, str], Judged]]:
    """The verdict on the case of this id, with a patch that makes every call of a 4-bit layer another one."""

    def judge(call: Call, case_id: str) -> Judged:
        monkeypatch.setitem(REGISTRY.patches, ID, planted(call))
        reach.here.cache_clear()
        (case,) = (case for case in CASES if case.id == case_id)
        return Verdicts([case]).of(case)

    yield judge
    monkeypatch.undo()
    reach.here.cache_clear()
    reach._codes.cache_clear()


HARM = {
    "right became wrong": (kept_by_version, "buffers.data_copy[nf4]"),
    "right became other bits": (more_exactly, "inputs.many_rows[nf4]"),
    "became a wrong number": (what_upstream_refuses, "inputs.inputs_of_another_width[nf4]"),
    "what was right raises ValueError": (not_a_single_row, "inputs.one_row[nf4]"),
}


@pytest.mark.parametrize("says", HARM)
def test_harm_is_found(says: str, judged: Callable[[Call, str], Judged]) -> None:
    """With all patches, and with the culprit alone; with none of the others alone."""
    call, case_id = HARM[says]
    faults = judged(call, case_id).faults
    assert [fault.partition(":")[0] for fault in faults] == ["with all patches", f"with {ID} alone"]
    assert all(says in fault for fault in faults), faults


@pytest.mark.parametrize("call, case_id", [(unchanged, case_id) for _, case_id in HARM.values()])
def test_what_does_no_harm_is_not_blamed(call: Call, case_id: str, judged: Callable[[Call, str], Judged]) -> None:
    found = judged(call, case_id)
    assert ID in found.reached
    assert not found.faults
