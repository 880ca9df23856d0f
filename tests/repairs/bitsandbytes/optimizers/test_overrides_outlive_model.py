"""Overrides of the optimizer's configuration: gone with their model, kept for every parameter that they were made for."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.optim import Adam8bit, GlobalOptimManager
from torch.nn import Linear, Parameter, Sequential

import patches
from patches.engine.gate import satisfied

ID = "bitsandbytes-overrides"
BITS_32 = {"optim_bits": 32}


@pytest.fixture(autouse=True)
def manager():
    """The manager of the process, empty."""
    GlobalOptimManager.get_instance().initialize()
    yield GlobalOptimManager.get_instance()
    GlobalOptimManager.get_instance().initialize()


@pytest.fixture(params=["unpatched", "patched"])
def either(request):
    if request.param == "patched":
        patches.apply(ID, strict=True)
    return request.param


def states(parameters, **options) -> list[torch.dtype]:
    """Of each parameter after a step with an 8-bit optimizer. Before 0.50 that fails on a CPU, with the state made."""
    parameters = list(parameters)
    found = []
    optimizer = Adam8bit(parameters, **options)
    for chosen in parameters:
        optimizer.zero_grad()
        chosen.grad = torch.ones_like(chosen)
        with contextlib.suppress(AttributeError, RuntimeError):
            optimizer.step()
        found.append(optimizer.state[chosen]["state1"].dtype)
    return found


def model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(64, 64, bias=False), Linear(64, 64, bias=False))


SECOND = [torch.uint8, torch.float32]
"""What :func:`states` finds where the second of two parameters has 32 bits."""


def trainer(net, folder):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=folder, optim="adamw_8bit", use_cpu=True, report_to=[])
    Trainer(model=net, args=arguments).create_optimizer()


def loraplus(net, folder):
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    adapted = get_peft_model(net, LoraConfig(r=4, target_modules=["0"]))
    create_loraplus_optimizer(adapted, Adam8bit, lr=1e-3, loraplus_lr_ratio=4.0)


def one_step(net, folder):
    states([next(net.parameters())])


@pytest.mark.parametrize("embedding", [torch.nn.Embedding, bnb.nn.Embedding, bnb.nn.StableEmbedding])
@pytest.mark.parametrize("use", [trainer, loraplus, one_step])
def test_models_are_kept_by_nobody(use, embedding, tmp_path, manager, either):
    registered = use is not one_step or embedding is not torch.nn.Embedding
    alive = []
    for _ in range(3):
        net = Sequential(embedding(64, 64), Linear(64, 64))
        alive.append(weakref.ref(net[0].weight))
        use(net, tmp_path)
        del net
    gc.collect()
    assert sum(weight() is not None for weight in alive) == (3 if registered and either == "unpatched" else 0)
    if either == "patched":
        assert not manager.pid2config and not manager.index2config
        manager.register_module_override(Linear(4, 4), "weight", BITS_32)
        assert len(manager.module_weight_config_triple) == 1, "the rest was dropped"


def test_new_parameters_with_the_ids_of_old_ones_have_no_override(manager, either):
    old = [Parameter(torch.zeros(64, 64)) for _ in range(200)]
    manager.override_config(old, "optim_bits", 32)
    dead = set(map(id, old))
    del old
    new: list[Parameter] = []
    while not (alike := [p for p in new if id(p) in dead]) and len(new) < 100_000:  # until Python gives such a place
        new += [Parameter(torch.empty(0)) for _ in range(1000)]
    for parameter in alike:
        parameter.data = torch.zeros(64, 64)
    assert alike and set(states(alike)) == {torch.uint8 if either == "patched" else inherited()}


def inherited() -> torch.dtype:
    """Before 0.50 an override by parameter alone is not looked up, and so not inherited."""
    return torch.float32 if satisfied("bitsandbytes>=0.50") else torch.uint8


def test_a_live_parameter_at_the_same_place_has_no_override(manager, either):
    embedding = bnb.nn.StableEmbedding(64, 64)
    assert states([embedding.weight]) == [torch.float32]
    other = Parameter(torch.zeros(64, 64))
    assert states([other]) == [torch.uint8 if either == "patched" else torch.float32]
    assert states([embedding.weight]) == [torch.float32]


@pytest.mark.parametrize("first", ["override", "registration of parameters"])
def test_override_of_a_module(first, manager, either):
    net = model()
    if first == "override":
        manager.register_module_override(net[1], "weight", BITS_32)
        manager.register_parameters(net.parameters())
    else:
        manager.register_parameters(net.parameters())
        manager.register_module_override(net[1], "weight", BITS_32)
    for _ in range(2):
        assert states(net.parameters()) == SECOND
    assert states(net.to(torch.bfloat16).parameters()) == SECOND
    if either == "patched":
        assert states(reversed(list(net.parameters()))) == SECOND[::-1], "another optimizer, other places"


@pytest.mark.parametrize("how", ["key", "dict", "list"])
def test_override_by_parameter_before_they_are_registered(how, manager, either):
    net = model()
    if how == "key":
        manager.override_config(net[1].weight, "optim_bits", 32)
    else:
        chosen = net[1].weight if how == "dict" else [net[1].weight]
        manager.override_config(chosen, key_value_dict=dict(BITS_32))
    manager.register_parameters(net.parameters())
    assert states(net.parameters()) == SECOND
    assert states(copy.deepcopy(net).parameters()) == SECOND, "by place"
    assert states([p.detach().to(torch.float64).float() for p in net.parameters()]) == SECOND, "by place"


def test_override_by_parameter_alone(manager):
    """The order of the documentation. Before 0.50 it did nothing."""
    patches.apply(ID, strict=True)
    net = model()
    manager.register_parameters(net.parameters())
    manager.override_config(net[1].weight, "optim_bits", 32)
    assert states(net.parameters()) == SECOND
    assert states(net.to(torch.bfloat16).parameters()) == SECOND
    manager.override_config(net[1].weight, "optim_bits", 8)
    assert states(net.parameters()) == [torch.uint8] * 2


def test_by_place_what_has_moved_to_another_tensor(manager, either):
    """The tensors that were registered are gone when the optimizer is made, as when they move to a GPU."""
    tensors = [torch.zeros(64, 64) for _ in range(2)]
    manager.override_config(tensors[1], "optim_bits", 32)
    manager.register_parameters(tensors)
    tensors = [tensor.clone() for tensor in tensors]
    gc.collect()
    assert states(tensors) == SECOND


def test_the_parameter_that_the_module_has_at_the_first_step(manager, either):
    net = model()
    manager.register_module_override(net[1], "weight", BITS_32)
    net[1].weight = Parameter(torch.zeros(64, 64))
    assert states(net.parameters()) == SECOND


def test_a_parameter_that_outlives_its_module(manager, either):
    net = model()
    manager.register_module_override(net[1], "weight", BITS_32)
    parameters = list(net.parameters())
    module = weakref.ref(net[1])
    del net
    gc.collect()
    assert (module() is None) == (either == "patched")
    assert states(parameters) == SECOND


def test_what_is_registered_while_an_optimizer_looks_costs_nobody_an_override(manager):
    """By another thread, as it is here by an attribute: what is gone by then is dropped."""
    patches.apply(ID, strict=True)
    dying = []

    class Registers(Linear):
        def __getattr__(self, name):
            dying.clear()
            manager.register_module_override(torch.nn.Linear(4, 4), "weight", BITS_32)
            return super().__getattr__(name)

    first, net = Registers(64, 64), model()
    dying.append(Linear(64, 64))
    gone = weakref.ref(dying[0])
    for module in (dying[0], first, net[1]):
        manager.register_module_override(module, "weight", BITS_32)
    del module
    assert gone() is not None and len(manager.module_weight_config_triple) == 3
    assert states(net.parameters()) == SECOND and gone() is None


@pytest.mark.skipif(not satisfied("bitsandbytes>=0.50"), reason="before 0.50 nothing steps on a CPU")
def test_a_compiled_step(manager, either):
    """The first step, in which an optimizer looks for overrides, also for one that is gone."""
    torch._dynamo.reset()
    for _ in range(2):
        net = Sequential(bnb.nn.StableEmbedding(64, 64), Linear(64, 64))
        manager.register_module_override(Linear(64, 64), "weight", BITS_32)
        optimizer = Adam8bit(net.parameters())
        step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
        for _ in range(2):
            net(torch.arange(8)).sum().backward()
            step()
        assert [optimizer.state[p]["state1"].dtype for p in (net[0].weight, net[1].weight)] == SECOND[::-1]
        del net, optimizer, step
        gc.collect()


def test_what_was_registered_is_found_after_revert(manager):
    patches.apply(ID, strict=True)
    net = model()
    manager.register_module_override(net[1], "weight", BITS_32)
    patches.revert()
    assert states(net.parameters()) == SECOND
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None and len(states(model().parameters())) == 2, "one that is gone is passed over"


def test_values_of_a_configuration_that_is_kept(manager, either):
    """Each key alone, and what comes later on top of it."""
    net = model()
    manager.override_config(net[0].weight, "lr", 0.5)
    manager.override_config(net[0].weight, key_value_dict={"eps": 0.25})
    manager.register_parameters(net.parameters())
    manager.override_config(net[0].weight, "lr", 0.125)
    optimizer = Adam8bit(net.parameters(), lr=1.0, eps=0.75)
    found = [optimizer.get_config(0, index, optimizer.param_groups[0]) for index in range(2)]
    assert [(config["lr"], config["eps"]) for config in found] == [(0.125, 0.25), (1.0, 0.75)]


def unpickled(thing):
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("kind", [bnb.nn.StableEmbedding, bnb.nn.Embedding])
@pytest.mark.parametrize("way", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("trained", [True, False])
def test_a_copy_of_an_embedding_has_the_override_of_its_original(kind, way, trained):
    with patches.applied(ID):
        original = Sequential(kind(64, 64))
        if trained:
            assert states([original[0].weight]) == [torch.float32]
        made = way(original)
        assert states([made[0].weight]) == [torch.float32] == states([original[0].weight])
        del original, made
        gc.collect()
        assert states([Linear(64, 64).weight]) == [torch.uint8]


def test_a_registered_embedding_is_swapped_and_keeps_its_override(manager):
    """As ``torch.__future__.set_swap_module_params_on_conversion(True)`` does it, which DTensor subclasses ask for."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with patches.applied(ID):
            model = bnb.nn.StableEmbedding(64, 64)
            manager.register_parameters(model.parameters())
            weight = model.weight
            model.double().load_state_dict({**model.state_dict(), "weight": torch.ones(64, 64)})
            assert model.weight is weight and weight.dtype == torch.float64 and bool((weight == 1).all())
            watched = weakref.ref(weight)
            with pytest.raises(RuntimeError, match="swap"):
                model.float()
            del watched
            optimizer = Adam8bit(model.float().parameters())
            optimizer.check_overrides()
            optimizer.init_state(optimizer.param_groups[0], weight, 0, 0)
            assert optimizer.state[weight]["state1"].dtype == torch.float32
            key = id(weight)
            assert key in manager.pid2config
            del model, weight, optimizer
            gc.collect()
            assert key not in manager.pid2config
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
