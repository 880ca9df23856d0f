"""Paged AdEMAMix on a CPU, on parameters that are large enough to be paged."""

from __future__ import annotations

import bitsandbytes.optim
import pytest
import torch
from torch.nn import Linear

import patches
from patches.engine.gate import satisfied

ID = "bitsandbytes-ademamix"
pytestmark = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.50"), reason="before 0.50 no optimizer of bitsandbytes steps on a CPU"
)
FALLS_BACK = "Paged optimizers are not supported on CPU"


def train(name: str, size: int = 320, **options) -> list[torch.Tensor]:
    """The parameters and states after three steps."""
    torch.manual_seed(0)
    layer = Linear(size, size)
    optimizer = getattr(bitsandbytes.optim, name)(layer.parameters(), **options)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, size)).square().mean().backward()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [p.detach() for p in layer.parameters()] + [state for state in states if isinstance(state, torch.Tensor)]


def equal(one, other) -> bool:
    return len(one) == len(other) > 3 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("schedule", [{}, {"t_alpha": 4, "t_beta3": 4}])
@pytest.mark.parametrize("name", ["AdEMAMix", "AdEMAMix8bit"])
def test_steps_are_those_of_one_that_is_not_paged(name, schedule):
    expected = train(name, **schedule)
    with pytest.raises(RuntimeError, match="'cget_managed_ptr' not available"):
        train(f"Paged{name}", **schedule)
    with patches.applied(ID), pytest.warns(UserWarning, match=FALLS_BACK):
        assert equal(train(f"Paged{name}", **schedule), expected)


def test_the_class_with_32_bits_in_its_name():
    with patches.applied(ID, "bitsandbytes-ademamix"):
        assert equal(train("PagedAdEMAMix32bit"), train("AdEMAMix"))


@pytest.mark.parametrize("name", ["PagedAdEMAMix", "PagedAdEMAMix8bit"])
def test_what_is_too_small_to_be_paged_is_as_before(name):
    expected = train(name, size=64)
    with patches.applied(ID):
        assert equal(train(name, size=64), expected)


def test_trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Linear(320, 320)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean()}

    def fit(optim: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = Model()
        before = model.layer.weight.detach().clone()
        arguments = TrainingArguments(
            str(tmp_path), optim=optim, use_cpu=True, report_to=[], max_steps=2, save_strategy="no"
        )
        Trainer(model, arguments, train_dataset=[{"x": torch.full((320,), 0.1 * i)} for i in range(1, 9)]).train()
        assert not torch.equal(model.layer.weight, before)
        return model.layer.weight.detach()

    expected = fit("ademamix_8bit")
    with patches.applied(ID):
        assert torch.equal(fit("paged_ademamix_8bit"), expected)
