"""4-bit parameters of any module do not stay dequantized after checkpointed steps."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
import torch.nn.utils.parametrize as cache
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

import patches

ID = "bitsandbytes-parametrized-cache-leak"
RELEASE = Version(bitsandbytes.__version__)

pytestmark = pytest.mark.skipif(
    not Version("0.48") <= RELEASE < Version("0.50"),
    reason="older releases have no parametrized 4-bit parameters, newer ones do not leak them",
)


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 13:
            raise ValueError("a user's error")
        return torch.tanh(torch.tanh(x @ self.weight) @ self.weight)


def make(device: str) -> Expert:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    torch.manual_seed(0)
    expert = Expert().to(device)
    replace_parameter_4bit(expert, "weight", quant_type="nf4")
    return expert


def step(expert: Expert, device: str, reentrant: bool | None = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(2, 64, device=device, requires_grad=True)
    out = expert(x) if reentrant is None else checkpoint(expert, x, use_reentrant=reentrant)
    out.sum().backward()
    return out, x.grad


@pytest.fixture(autouse=True)
def clean_cache():
    assert (cache._cache_enabled, cache._cache) == (0, {})
    yield
    cache._cache_enabled, cache._cache = 0, {}


@pytest.mark.parametrize("before", [False, True], ids=["prepared after", "prepared before"])
def test_nothing_is_left(before, device):
    expert = make(device) if before else None
    with patches.applied(ID):
        expert = expert or make(device)
        for _ in range(3):
            step(expert, device)
            assert (cache._cache_enabled, cache._cache) == (0, {})


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_the_same_bits(reentrant, device):
    expert = make(device)
    unpatched = step(expert, device, reentrant)
    cache._cache_enabled, cache._cache = 0, {}
    with patches.applied(ID):
        assert all(map(torch.equal, step(expert, device, reentrant), unpatched))


def test_the_cache_still_works(device, monkeypatch):
    """One dequantization a forward, though the weight is read twice."""
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    expert, calls = make(device), []
    original = Bnb4bitParametrization.forward
    monkeypatch.setattr(Bnb4bitParametrization, "forward", lambda *a: calls.append(1) or original(*a))
    with patches.applied(ID), torch.no_grad():
        expert(torch.randn(2, 64, device=device))
    assert len(calls) == 1


def test_an_error_in_forward_leaves_nothing(device):
    with patches.applied(ID):
        expert = make(device)
        with pytest.raises(ValueError, match="a user's error"):
            expert(torch.randn(13, 64, device=device))
    assert (cache._cache_enabled, cache._cache) == (0, {})


def test_a_leak_from_before_is_named(device):
    step(make(device), device)
    assert cache._cache_enabled
    report = patches.apply(ID)
    assert any("parametrization cache was on" in note for note in report[ID].notes)
