"""An override of one parameter is one of that parameter, whatever it had together with others."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.optim import Adam8bit, GlobalOptimManager
from torch.nn import Linear, Sequential

import patches
from patches.engine.gate import satisfied

ID = "bitsandbytes-overrides"
OUTLIVES, COPIES = "bitsandbytes-overrides", "bitsandbytes-optimizer-copies"
BY_PARAMETER = satisfied("bitsandbytes>=0.50")
"""Before, an override of parameters counts where they are registered after it."""
GIVEN = {"key": {"key": "lr", "value": 0.5}, "dict": {"key_value_dict": {"lr": 0.5}}}
on_a_cpu = pytest.mark.skipif(not BY_PARAMETER, reason="before 0.50 no optimizer of bitsandbytes steps on a CPU")


@pytest.fixture(autouse=True)
def manager():
    """The manager of the process, empty."""
    GlobalOptimManager.get_instance().initialize()
    yield GlobalOptimManager.get_instance()
    GlobalOptimManager.get_instance().initialize()


@pytest.fixture(params=["unpatched", "patched", "patched with its neighbours"])
def either(request):
    if request.param != "unpatched":
        patches.apply(ID, *((OUTLIVES, COPIES) if "neighbours" in request.param else ()), strict=True)
    return request.param


@pytest.fixture
def patched():
    patches.apply(ID, strict=True)


def model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(*(Linear(64, 64, bias=False) for _ in range(3)))


def found(net: Sequential, *keys: str, optimizer=None) -> list[tuple]:
    """What an optimizer goes by, for each parameter."""
    optimizer = optimizer or Adam8bit(net.parameters(), lr=1.0, eps=1.0)
    configs = [optimizer.get_config(0, index, optimizer.param_groups[0]) for index in range(3)]
    return [tuple(config[key] for key in keys) for config in configs]


@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("registered", ["before the second", "last"])
def test_a_later_override_of_one(registered, how, manager, either):
    net = model()
    first, second, _ = net.parameters()
    manager.override_config([first, second], **copy.deepcopy(GIVEN[how]))
    if registered != "last":
        manager.register_parameters(net.parameters())
    manager.override_config(first, "optim_bits", 32)
    if registered == "last":
        manager.register_parameters(net.parameters())
    expected = [(0.5, 32), (0.5, 32 if either == "unpatched" else 8), (1.0, 8)]
    assert found(net, "lr", "optim_bits") == expected
    assert found(copy.deepcopy(net), "lr", "optim_bits") == expected, "by place"


def test_one_dict_in_two_calls_and_what_the_caller_has_of_it(manager, either):
    net = model()
    first, second, _ = net.parameters()
    slow = {"lr": 0.5}
    manager.override_config(first, key_value_dict=slow)
    manager.override_config(second, key_value_dict=slow)
    manager.override_config(second, "lr", 0.25)
    manager.register_parameters(net.parameters())
    assert found(net, "lr") == [(0.25 if either == "unpatched" else 0.5,), (0.25,), (1.0,)]
    assert slow == {"lr": 0.25 if either == "unpatched" else 0.5}


def test_an_override_of_all_after_one_of_one(manager, either):
    net = model()
    first, second, _ = net.parameters()
    manager.override_config([first, second], "lr", 0.5)
    manager.override_config(first, "lr", 0.25)
    manager.override_config([first, second], key_value_dict={"lr": 0.125, "eps": 0.5})
    manager.register_parameters(net.parameters())
    assert found(net, "lr", "eps") == [(0.125, 0.5), (0.125, 0.5), (1.0, 1.0)]


@pytest.mark.parametrize("optimizer_is_made", ["before", "after"])
def test_a_dict_that_the_caller_goes_on_writing(optimizer_is_made, manager, either):
    """A learning rate that is lowered in the dict that was given: counts, for all that it was given to."""
    net = model()
    first, second, _ = net.parameters()
    slow = {"lr": 0.5}
    manager.override_config([first, second], key_value_dict=slow)
    manager.register_parameters(net.parameters())
    optimizer = Adam8bit(net.parameters(), lr=1.0) if optimizer_is_made == "before" else None
    for slow["lr"] in (0.25, 0.125):
        assert found(net, "lr", optimizer=optimizer) == [(slow["lr"],), (slow["lr"],), (1.0,)]


def test_an_override_of_a_module_is_kept_by_the_next_optimizer(manager, either):
    """It is noted anew in the first step of each optimizer, with what was overridden since."""
    net = model()
    manager.register_module_override(net[0], "weight", {"optim_bits": 32})
    for lr in (0.5, 0.25):
        optimizer = Adam8bit(net.parameters(), lr=1.0)
        optimizer.check_overrides()
        manager.override_config(net[0].weight, "lr", lr)
        assert found(net, "lr", "optim_bits", optimizer=optimizer) == [(lr, 32), (1.0, 8), (1.0, 8)]
    optimizer = Adam8bit(net.parameters(), lr=1.0)
    optimizer.check_overrides()
    assert found(net, "lr", "optim_bits", optimizer=optimizer) == [(0.25, 32), (1.0, 8), (1.0, 8)]


@on_a_cpu
def test_steps_without_a_later_override_are_the_same_bits(manager):
    def train() -> list[torch.Tensor]:
        manager.initialize()
        net = model()
        first, second, _ = net.parameters()
        manager.override_config([first, second], key_value_dict={"lr": 1e-2, "optim_bits": 32})
        optimizer = Adam8bit(net.parameters())
        for _ in range(3):
            net(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    expected = train()
    with patches.applied(ID):
        assert all(map(torch.equal, train(), expected))


@on_a_cpu
@pytest.mark.parametrize("how", GIVEN)
def test_a_compiled_step(how, manager, patched):
    torch._dynamo.reset()
    nets = [model(), model()]
    for net, wrap in zip(nets, (lambda step: step, lambda step: torch.compile(step, fullgraph=True, backend="eager"))):
        first, second, _ = net.parameters()
        manager.override_config([first, second], **copy.deepcopy(GIVEN[how]))
        manager.override_config(first, "optim_bits", 32)
        optimizer = Adam8bit(net.parameters())
        step = wrap(optimizer.step)
        for _ in range(2):
            net(torch.ones(2, 64)).square().sum().backward()
            step()
        dtypes = [optimizer.state[p]["state1"].dtype for p in net.parameters()]
        assert dtypes == [torch.float32, torch.uint8, torch.uint8]
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_what_was_noted_patched_counts_after_revert(manager, patched):
    net = model()
    first, second, _ = net.parameters()
    manager.override_config([first, second], "lr", 0.5)
    patches.revert()
    manager.override_config(first, "lr", 0.25)
    manager.register_parameters(net.parameters())
    assert found(net, "lr") == [(0.25,), (0.5,), (1.0,)]
    assert manager.pid2config[id(second)] == {"lr": 0.5}


def test_an_override_by_its_key_is_kept_in_a_dict_as_before(manager, patched):
    (parameter,) = Linear(64, 64, bias=False).parameters()
    manager.override_config(parameter, "lr", 0.5)
    assert type(manager.pid2config[id(parameter)]) is dict
