"""Moves of modules that hold quantized parameters: class, attributes, gradient and order of calls stay."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Embedding4bit, Embedding8bit, Int8Params, Linear4bit, Linear8bitLt

import patches
from patches.engine.gate import satisfied
from tests.repairs.tagged import Tagged4, Tagged8

FOUR, EIGHT = "bitsandbytes-linear4bit-meta-moves", "bitsandbytes-int8-meta-moves"
STATISTICS = "bitsandbytes-params4bit-meta"
PLAIN_4, PLAIN_8 = "bitsandbytes-linear4bit-plain-weight", "bitsandbytes-int8-plain-weight"


LAYERS = [(Linear4bit, Tagged4), (Embedding4bit, Tagged4), (Linear8bitLt, Tagged8), (Embedding8bit, Tagged8)]


@pytest.mark.parametrize("layer, cls", LAYERS)
def test_a_subclass_goes_to_meta_and_back(layer, cls):
    options = {"has_fp16_weights": False} if layer is Linear8bitLt else {}
    made = layer(64, 64, **options)
    made.weight = cls("mine", torch.randn(64, 64))
    with patches.applied(FOUR, EIGHT, STATISTICS):
        made.to("cpu").to("meta")
        assert type(made.weight) is cls and made.weight.is_meta and made.weight.tag == "mine"
        made.to_empty(device="cpu")
        assert type(made.weight) is cls and not made.weight.is_meta and made.weight.tag == "mine"


@pytest.mark.skipif(not satisfied("bitsandbytes>=0.48"), reason="before 0.48 a move quantizes packed weights again")
def test_scales_that_alone_are_on_meta_have_no_values_after_a_move():
    made = Embedding8bit(64, 64).to("cpu")
    made.weight.SCB = made.weight.SCB.to("meta")
    with patches.applied(EIGHT):
        made.to("cpu")
        assert made.weight.SCB.is_meta
        with pytest.raises(RuntimeError, match="meta"):
            made(torch.tensor([1]))


def move(model):
    model.to("meta")


def move_weight(model):
    model[0].weight = model[0].weight.to("meta")


ON_META = [(Linear4bit, FOUR, move), (Linear4bit, STATISTICS, move_weight), (Linear8bitLt, EIGHT, move)]


@pytest.mark.parametrize("layer, identifier, move", ON_META)
def test_a_quantized_layer_on_meta_refuses_an_input_that_is_not(layer, identifier, move):
    """The operators would answer with uninitialized memory."""
    made = torch.nn.Sequential(layer(64, 64, **options(layer))).to("cpu")
    x = torch.randn(2, 64)
    expected = made(x)
    saved = {name: value.clone() for name, value in made.state_dict().items()}
    with patches.applied(identifier):
        assert torch.equal(made(x), expected) and torch.equal(compiled(made)(x), expected)
        move(made)
        for run in (made, made.eval()):
            with pytest.raises(RuntimeError, match=rf"{layer.__name__} '0' is on the meta device.*load_state_dict"):
                run(x)
    with patches.applied():
        assert made.to("meta")(x.to("meta")).is_meta
        made.load_state_dict(saved, assign=True)
        assert torch.equal(made.train()(x), expected)


PLAIN_ON_META = [
    (Linear4bit, PLAIN_4, torch.float32),
    (Linear8bitLt, PLAIN_8, torch.float32),
    (Linear8bitLt, PLAIN_8, torch.int8),
]


@pytest.mark.parametrize("layer, identifier, dtype", PLAIN_ON_META)
def test_a_plain_weight_on_meta_too(layer, identifier, dtype):
    made = torch.nn.Sequential(layer(64, 64, **options(layer))).to("cpu")
    made(torch.randn(2, 64))
    with patches.applied(identifier), pytest.raises(RuntimeError, match=f"{layer.__name__} '0' is on the meta device"):
        weights = {"0.weight": torch.empty(64, 64, dtype=dtype, device="meta")}
        torch.func.functional_call(made, weights, torch.randn(2, 64))


def options(layer):
    return {"has_fp16_weights": False} if layer is Linear8bitLt else {"quant_type": "nf4"}


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="eager")


def test_a_gradient_goes_along():
    layer = Linear8bitLt(8, 8)
    layer.weight.square().sum().backward()  # a penalty on the weights
    assert layer.weight.grad is not None
    with patches.applied(EIGHT):
        layer.to("meta")
        assert layer.weight.grad is not None and layer.weight.grad.is_meta and layer.weight.requires_grad
        assert type(layer.weight) is Int8Params and layer.weight.is_leaf


class Counts(torch.nn.Module):
    """A class between ours and ``nn.Module`` that has its own say, as mixins of users do."""

    def _apply(self, fn, recurse=True):
        self.moves = vars(self).get("moves", 0) + 1
        return super()._apply(fn, recurse)

    def __setattr__(self, name, value):
        vars(self).setdefault("names", []).append(name)
        super().__setattr__(name, value)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.restored = True


class Four(Linear4bit, Counts):
    pass


class Eight(Linear8bitLt, Counts):
    pass


@pytest.mark.parametrize("cls", [Four, Eight])
def test_what_stands_between_is_asked(cls):
    import copy

    with patches.applied():
        layer = cls(64, 64, **({"has_fp16_weights": False} if cls is Eight else {"quant_type": "nf4"}))
        layer.to("cpu").half()
        assert layer.moves == 2 and "weight" in layer.names
        assert copy.deepcopy(layer).restored


@pytest.mark.parametrize("layer", [Linear4bit, Linear8bitLt, torch.nn.Linear])
def test_moves_that_do_not_recurse(layer):
    """``_apply(fn, recurse=False)`` as FSDP calls it, by place and by name."""
    seen = []

    def look(tensor):
        seen.append(tensor)
        return tensor

    with patches.applied():
        model = torch.nn.Sequential(layer(8, 8))
        assert model._apply(look, False) is model and model._apply(look, recurse=False) is model and not seen
        assert model._apply(look) is model and len(seen) == 2
        assert model[0]._apply(look, recurse=False) is model[0] and len(seen) == 4
