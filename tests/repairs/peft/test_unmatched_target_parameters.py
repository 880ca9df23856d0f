"""Names in ``target_parameters`` that no parameter has."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import patches
from patches.engine.gate import satisfied

ID = "peft-unmatched-target-parameters"

if satisfied("peft<0.19"):
    pytest.skip("peft before 0.19 adapts one parameter of a module", allow_module_level=True)


def said(*names: str, adapters: int = 1) -> list[str]:
    """What is warned of when ``names`` are targeted."""
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.up_proj, model.experts.down_proj = (torch.nn.Parameter(torch.randn(2, 4, 4)) for _ in range(2))
    model.router = torch.nn.Linear(4, 2)
    config = peft.LoraConfig(r=2, target_modules=["router"], target_parameters=list(names))
    with patches.applied(ID), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = peft.get_peft_model(model, config)
        for number in range(1, adapters):
            adapted.add_adapter(f"{number}", config)
    assert any(".experts." in name for name, _ in adapted.named_parameters() if "lora_" in name) == (
        names != ("experts.no",)
    )
    return [str(warning.message) for warning in caught if "target_parameters" in str(warning.message)]


def test_a_name_that_matches_nothing_is_said_with_what_there_is():
    (message,) = said("experts.up_proj", "experts.down_projs")
    assert "'experts.down_projs'" in message and "experts.down_proj, experts.up_proj" in message


@pytest.mark.parametrize("adapters", [1] if satisfied("peft<0.20") else [1, 2])
def test_names_that_match_are_not(adapters):
    assert not said("experts.up_proj", "down_proj", adapters=adapters)


def test_of_names_that_all_match_nothing_peft_warns():
    (message,) = said("experts.no")
    assert "no parameter was matched" in message
