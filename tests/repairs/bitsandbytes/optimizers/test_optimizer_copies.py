"""Optimizers of bitsandbytes that were copied or pickled go on as what they were made of."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import bitsandbytes.optim
import pytest
import torch
from bitsandbytes.optim import Adam8bit, GlobalOptimManager
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch.nn import Linear, Sequential

import patches
from patches.engine.gate import satisfied

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-optimizer-copies"
STEPS = satisfied("bitsandbytes>=0.50")
on_a_cpu = pytest.mark.skipif(not STEPS, reason="before 0.50 no optimizer of bitsandbytes steps on a CPU")
BROKEN = ("AdEMAMix32bit", "PagedAdEMAMix32bit")  # their first state is too small for their kernel
NAMES = sorted(
    name for name, kind in vars(bitsandbytes.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer8bit) and name not in BROKEN
)  # fmt: skip


@pytest.fixture(autouse=True)
def manager():
    """The manager of the process, empty."""
    GlobalOptimManager.get_instance().initialize()
    yield GlobalOptimManager.get_instance()
    GlobalOptimManager.get_instance().initialize()


@pytest.fixture
def patched():
    patches.apply(ID, strict=True)


def saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair)), "torch.save": saved}


def made(name: str = "Adam8bit", **options) -> tuple[Sequential, Optimizer8bit]:
    torch.manual_seed(0)
    model = Sequential(Linear(64, 96), Linear(96, 64, bias=False))
    options |= {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
    return model, getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, **options)


def train(model: Sequential, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


def everything(model: Sequential, optimizer: Optimizer8bit) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [*(p.detach() for p in model.parameters()), *(each for each in states if isinstance(each, torch.Tensor))]


def equal(one, other) -> bool:
    one, other = everything(*one), everything(*other)
    return len(one) == len(other) and all(map(torch.equal, one, other))


@on_a_cpu
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_goes_on_as_its_original(name, how, patched):
    pair = made(name)
    train(*pair, range(3))
    other = COPIES[how](pair)
    before = [each.clone() for each in everything(*pair)]
    train(*other, range(3, 5))
    assert all(map(torch.equal, everything(*pair), before)), "the original stays"
    train(*pair, range(3, 5))
    assert equal(pair, other)


@on_a_cpu
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_one_that_has_not_stepped(how, patched):
    pair = made()
    other = COPIES[how](pair)
    for each in (pair, other):
        train(*each, range(3))
    assert equal(pair, other) and other[1].state[other[0][0].weight]["state1"].dtype == torch.uint8


@on_a_cpu
def test_state_dict_of_a_copy_and_into_a_copy(patched):
    pair = made()
    train(*pair, range(2))
    other = copy.deepcopy(pair)
    train(*other, range(2, 4))
    pair[0].load_state_dict(other[0].state_dict())
    pair[1].load_state_dict(other[1].state_dict())
    assert equal(pair, other)
    again = copy.deepcopy(made())
    again[0].load_state_dict(other[0].state_dict())
    again[1].load_state_dict(other[1].state_dict())
    for each in (pair, again):
        train(*each, range(4, 6))
    assert equal(pair, again)


@pytest.mark.parametrize("stepped", [pytest.param(True, marks=on_a_cpu), False])
@pytest.mark.parametrize("by", ["module", "place", "parameter"])
@pytest.mark.parametrize("how", COPIES)
def test_overrides_are_those_of_the_copied_parameters(how, by, stepped, manager, patched):
    pair = model, optimizer = made()
    if by == "module":
        manager.register_module_override(model[1], "weight", {"lr": 0.5})
    else:
        manager.override_config(model[1].weight, "lr", 0.5)
    if by == "place":
        manager.register_parameters(model.parameters())
    if stepped:
        train(*pair, range(2))
    other_model, other = COPIES[how](pair)
    manager.index2config.clear()  # as in a process of its own
    assert [other.get_config(0, index, other.param_groups[0])["lr"] for index in range(3)] == [1e-2, 1e-2, 0.5]
    manager.override_config(other_model[1].weight, "lr", 0.25)
    assert optimizer.get_config(0, 2, optimizer.param_groups[0])["lr"] in (0.5, 1e-2), "the original has its own"


def test_managers_are_those_of_the_process(manager, patched):
    _, optimizer = made()
    given = optimizer.__getstate__()
    assert not {"mng", "page_mng"} & given.keys()
    other = copy.deepcopy(optimizer)
    assert other.mng is manager and other.page_mng is optimizer.page_mng
    assert vars(optimizer).keys() - vars(other).keys() <= {"_warned_capturable_if_run_uncaptured"}
    assert "_patches_overrides" not in vars(other)
    assert other.args is not optimizer.args and vars(other.args) == vars(optimizer.args)


def test_paged_states_are_copied_as_before(patched):
    """A copy would be taken for managed memory. The attribute is what the optimizers go by."""
    model, optimizer = made("PagedAdamW8bit")
    buffer = torch.zeros(64, 64, dtype=torch.uint8)
    buffer.is_paged = True
    optimizer.state[model[0].weight] = {"state1": buffer}
    other = copy.deepcopy(optimizer)
    with pytest.raises(AttributeError, match="has no attribute 'initialized'"):
        other.step()


@pytest.mark.parametrize("how", ["written unpatched", "read unpatched"])
def test_files_between_processes_with_the_plugin_and_without_it(how):
    pair = made()
    with patches.applied(ID) if how == "read unpatched" else contextlib.nullcontext():
        file = pickle.dumps(pair)
    with patches.applied(ID) if how == "written unpatched" else contextlib.nullcontext():
        _, optimizer = pickle.loads(file)
        with pytest.raises(AttributeError, match="has no attribute '(initialized|mng)'"):
            optimizer.step()


def test_the_parameters_are_those_of_the_copied_model(patched):
    model, optimizer = copy.deepcopy(made())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert isinstance(optimizer, Adam8bit) and optimizer.args.optim_bits == 8
