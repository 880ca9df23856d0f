"""AdEMAMix32bit and PagedAdEMAMix32bit: the optimizer that AdEMAMix is with 32 bits, to the bit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from bitsandbytes.optim import AdEMAMix, AdEMAMix32bit, GlobalOptimManager, PagedAdEMAMix32bit
from bitsandbytes.optim.ademamix import _ReferenceAdEMAMix
from torch.nn import Linear, Sequential

import patches
from patches.engine.gate import satisfied

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-ademamix"
on_a_cpu = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.50"), reason="before 0.50 no optimizer of bitsandbytes steps on a CPU"
)
both = pytest.mark.parametrize("kind", [AdEMAMix32bit, PagedAdEMAMix32bit])
SCHEDULES = [{}, {"t_alpha": 4}, {"t_beta3": 4}, {"t_alpha": 3, "t_beta3": 5}]


@pytest.fixture
def patched():
    patches.apply(ID, strict=True)


@pytest.fixture
def manager():
    GlobalOptimManager.get_instance().initialize()
    yield GlobalOptimManager.get_instance()
    GlobalOptimManager.get_instance().initialize()


def made(kind, **options):
    torch.manual_seed(0)
    model = Sequential(Linear(64, 96), Linear(96, 64))
    return model, kind(model.parameters(), lr=1e-2, **options)


def train(model, optimizer, steps=range(5)):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


def everything(model, optimizer):
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [*(p.detach() for p in model.parameters()), *(each for each in states if isinstance(each, torch.Tensor))]


def equal(one, other) -> bool:
    one, other = everything(*one), everything(*other)
    return len(one) == len(other) and all(map(torch.equal, one, other))


@both
@pytest.mark.parametrize("when", ["unpatched", "patched"])
def test_the_first_state_holds_two_averages(kind, when):
    """On a CPU: before 0.50 the step fails with the state made, and so it does from there on unpatched."""
    if when == "patched":
        patches.apply(ID, strict=True)
    model, optimizer = made(kind)
    with contextlib.suppress(AttributeError, RuntimeError):
        train(model, optimizer)
    shape = optimizer.state[model[0].weight]["state1"].shape
    assert shape == ((2, 96, 64) if when == "patched" else (96, 64))


@on_a_cpu
@both
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_are_those_of_ademamix(kind, schedule, patched):
    found, expected = made(kind, **schedule), made(AdEMAMix, **schedule)
    for each in (found, expected):
        train(*each)
    assert equal(found, expected)


@on_a_cpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_are_those_of_the_reference(schedule, patched):
    """Which is for one parameter a group: it schedules again what it has scheduled for the one before."""
    found, expected = made(AdEMAMix32bit, **schedule), made(AdEMAMix)
    groups = [{"params": [p]} for p in expected[0].parameters()]
    for each in (found, (expected[0], _ReferenceAdEMAMix(groups, lr=1e-2, **schedule))):
        train(*each)
    for ours, theirs in zip(found[0].parameters(), expected[0].parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@on_a_cpu
def test_a_schedule_of_one_group(patched):
    def of(kind):
        model, _ = made(kind)
        groups = [{"params": model[0].parameters(), "t_alpha": 4}, {"params": model[1].parameters()}]
        return model, kind(groups, lr=1e-2)

    found, expected, none = of(AdEMAMix32bit), of(AdEMAMix), made(AdEMAMix)
    for each in (found, expected, none):
        train(*each)
    assert equal(found, expected) and not equal(found, none)


@on_a_cpu
def test_an_override_to_8_bits(manager, patched):
    pairs = [made(kind, min_8bit_size=256) for kind in (AdEMAMix32bit, AdEMAMix)]
    for pair in pairs:
        manager.override_config(pair[0][0].weight, "optim_bits", 8)
        train(*pair)
    assert equal(*pairs) and pairs[0][1].state[pairs[0][0][0].weight]["state1"].dtype == torch.uint8


@on_a_cpu
@pytest.mark.parametrize("schedule", [{}, {"t_alpha": 9, "t_beta3": 9}])
def test_goes_on_from_a_state_dict_of_either(schedule, patched):
    whole = made(AdEMAMix32bit, **schedule)
    train(*whole, range(5))
    for kind in (AdEMAMix32bit, AdEMAMix):
        begun, further = made(kind, **schedule), made(AdEMAMix32bit)
        train(*begun, range(3))
        further[0].load_state_dict(begun[0].state_dict())
        further[1].load_state_dict(copy.deepcopy(begun[1].state_dict()))
        train(*further, range(3, 5))
        assert equal(further, whole)


@on_a_cpu
def test_goes_on_as_a_copy(patched):
    patches.apply("bitsandbytes-optimizer-copies", strict=True)
    pair = made(PagedAdEMAMix32bit, t_alpha=9)
    train(*pair, range(3))
    other = copy.deepcopy(pair)
    for each in (pair, other):
        train(*each, range(3, 5))
    assert equal(pair, other)


@on_a_cpu
def test_a_state_that_was_made_unpatched_is_refused():
    old = made(AdEMAMix32bit)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        train(*old)
    patches.apply(ID, strict=True)
    pair = made(AdEMAMix32bit)
    pair[1].load_state_dict(copy.deepcopy(old[1].state_dict()))
    for each in (old, pair):
        before = [p.detach().clone() for p in each[0].parameters()]
        with pytest.raises(RuntimeError, match=r"AdEMAMix32bit.*of shape \(96, 64\).*optimizer.state.clear"):
            train(*each)
        assert all(map(torch.equal, each[0].parameters(), before)), "no number came of it"
        each[1].state.clear()
        train(*each)
    assert equal(old, pair)


@on_a_cpu
def test_a_subclass_that_makes_its_own_state_keeps_it(patched):
    class Own(AdEMAMix32bit):
        def init_state(self, group, p, gindex, pindex):
            self.state[p] = {"step": 0, "state1": torch.zeros(2, *p.shape), "state2": torch.zeros_like(p), "own": True}

    pair, expected = made(Own), made(AdEMAMix)
    for each in (pair, expected):
        train(*each)
    assert equal(pair, expected) and all(state["own"] for state in pair[1].state.values())


@on_a_cpu
@pytest.mark.parametrize("schedule", [{}, {"t_alpha": 4, "t_beta3": 4}])
def test_a_compiled_step(schedule, patched):
    torch._dynamo.reset()
    compiled, eager = made(AdEMAMix32bit, **schedule), made(AdEMAMix32bit, **schedule)
    train(*eager, range(2))
    compiled[1].step = torch.compile(compiled[1].step, fullgraph=True, backend="eager")
    train(*compiled, range(2))
    assert equal(compiled, eager)
