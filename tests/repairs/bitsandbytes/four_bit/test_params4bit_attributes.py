"""The quantization state under the names of its state dict, reached as FSDP and DCP reach it."""

from __future__ import annotations

import types

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.checkpoint import checkpoint

import patches
from patches.engine.gate import satisfied

bnb = pytest.importorskip("bitsandbytes")

ID = "bitsandbytes-params4bit-attributes"
lacking = pytest.mark.skipif(not satisfied("bitsandbytes<0.50"), reason="0.50.0 brought properties of its own")
PLAIN = ["bias", "weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"]
NESTED = [*PLAIN, "weight.nested_absmax", "weight.nested_quant_map"]


def layer(nested: bool = False) -> bnb.nn.Linear4bit:
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(64, 128, compute_dtype=torch.float32, compress_statistics=nested, quant_type="nf4")
    return made.to("cpu")


def pass_through(self, name):
    """What source builds before 0.50.0 had in its effect; the words are ours."""
    state = self.__dict__.get("quant_state")
    if state is None or name.startswith("__"):
        raise AttributeError(name)
    return state.code if name == "quant_map" else getattr(state, name)


def of_the_source_build():
    """``pass_through`` as a function of bitsandbytes' own module: one of anybody else would be left as it is."""
    return types.FunctionType(pass_through.__code__, vars(bnb.nn.modules), "__getattr__")


@pytest.mark.parametrize("nested", [False, True])
def test_names_and_values_are_those_of_0_50_2(nested):
    model = torch.nn.Sequential(layer(nested))
    plain = model.state_dict()
    with patches.applied(ID):
        reached = get_model_state_dict(model)
    assert sorted(reached) == sorted("0." + name for name in (NESTED if nested else PLAIN))
    for name, tensor in plain.items():
        assert torch.equal(reached[name], tensor), name


@lacking
def test_the_whole_state_of_the_statistics_is_reached():
    weight = layer(nested=True).weight
    state = weight.quant_state
    with patches.applied(ID):
        assert weight.absmax is state.absmax and weight.state2 is state.state2
        assert weight.code is weight.quant_map is state.code
        assert weight.offset is weight.nested_offset is state.offset
        assert weight.nested_absmax is state.state2.absmax
        assert weight.nested_quant_map is state.state2.code
        assert (weight.nested_blocksize, weight.nested_dtype) == (256, torch.float32)
    assert not hasattr(weight, "absmax")


def test_absent_where_there_is_nothing_to_show():
    with patches.applied(ID):
        raw = bnb.nn.Params4bit(torch.zeros(4, 4))
        single = layer(nested=False).weight
        assert not any(hasattr(raw, name) for name in ("absmax", "quant_map", "state2", "nested_absmax"))
        assert single.state2 is None
        assert not any(hasattr(single, name) for name in ("nested_absmax", "nested_quant_map", "nested_dtype"))
        with pytest.raises(AttributeError, match="'Params4bit' object has no attribute 'absmax'"):
            raw.absmax  # noqa: B018
        with pytest.raises(AttributeError, match="bitsandbytes__fp4"):
            single.quant_state.bitsandbytes__fp4  # noqa: B018


@lacking
def test_nothing_is_shadowed():
    from patches.quantized.four_bit.quant_state_names import NESTED, OWN

    assert not {*OWN, *NESTED} & {*dir(torch.nn.Parameter), *layer().weight.__dict__}
    weight = layer().weight
    weight.absmax = "set by the user"
    with patches.applied(ID):
        assert weight.absmax == "set by the user"
        weight.code = "set later"
        assert weight.code == "set later"
        del weight.code
        assert weight.code is weight.quant_state.code
    assert weight.absmax == "set by the user" and "code" not in weight.__dict__


def compiled(model, x):
    """Output and input gradient of a checkpointed pass, compiled as one graph, after an eager call.

    After one, because 0.46 and 0.49 cannot compile a first call for other reasons.
    """
    model(x)
    torch.compiler.reset()
    step = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    x = x.clone().requires_grad_()
    y = step(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def test_one_graph_under_checkpointing_equal_to_eager():
    model, x = torch.nn.Sequential(layer(nested=True)), torch.randn(3, 64)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.square().sum().backward()
    with patches.applied(ID):
        compiled_y, compiled_grad = compiled(model, x)
    assert torch.equal(compiled_y, y) and torch.equal(compiled_grad, leaf.grad)


@lacking
def test_source_builds_with_a_getattr(monkeypatch):
    theirs = of_the_source_build()
    monkeypatch.setattr(bnb.nn.Params4bit, "__getattr__", theirs, raising=False)
    model, x = torch.nn.Sequential(layer()), torch.randn(3, 64)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model, x)
    with patches.applied(ID):
        compiled(model, x)
        assert model[0].weight.absmax is model[0].weight.quant_state.absmax
        get_model_state_dict(model)
    assert bnb.nn.Params4bit.__dict__["__getattr__"] is theirs


@lacking
def test_a_getattr_of_the_user_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(bnb.nn.Params4bit, "__getattr__", pass_through, raising=False)
    with patches.applied(ID):
        assert bnb.nn.Params4bit.__dict__["__getattr__"] is pass_through
        assert patches.report(ID)[ID].status is patches.Status.SHADOWED


@lacking
def test_a_release_that_brought_its_own_properties_keeps_them(monkeypatch):
    theirs = property(lambda self: "theirs")
    monkeypatch.setattr(bnb.nn.Params4bit, "absmax", theirs, raising=False)
    with patches.applied(ID):
        assert bnb.nn.Params4bit.__dict__["absmax"] is theirs


def test_saving_and_copying_see_no_more_than_before():
    import copy

    model = layer(nested=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with patches.applied(ID):
        after, copied = model.state_dict(), copy.deepcopy(model)
        assert list(after) == list(before) == list(copied.state_dict())
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert "absmax" not in copied.weight.__dict__
