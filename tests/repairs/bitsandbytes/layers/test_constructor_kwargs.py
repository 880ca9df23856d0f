"""Attributes that other libraries leave on quantized parameters survive being handed to the constructor."""

from __future__ import annotations

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")

ID = "bitsandbytes-constructor-kwargs"


def test_unknown_keywords_are_ignored_and_known_ones_are_not():
    data = torch.arange(8.0).view(4, 2)
    with patches.applied(ID):
        four = bnb.nn.Params4bit(data, quant_type="nf4", blocksize=128, _is_hf_initialized=True, mark=1)
        eight = bnb.nn.Int8Params(data, requires_grad=False, SCB=torch.ones(4), _is_hf_initialized=True, mark=1)
    assert (four.quant_type, four.blocksize, four.requires_grad) == ("nf4", 128, False)
    assert torch.equal(four, data) and torch.equal(eight, data) and torch.equal(eight.SCB, torch.ones(4))
    for parameter in (four, eight):
        assert not {"mark", "_is_hf_initialized"} & set(vars(parameter))


def test_positional_arguments_keep_their_places():
    data = torch.zeros(4, 2)
    with patches.applied(ID):
        assert bnb.nn.Params4bit(data, False, None, 256).blocksize == 256
        assert bnb.nn.Int8Params(data, False, True).has_fp16_weights is True
        with pytest.raises(TypeError):
            bnb.nn.Int8Params(data, False, True, None, None, "one too many")


@pytest.mark.parametrize("cls", [bnb.nn.Params4bit, bnb.nn.Int8Params])
def test_subclasses_reach_it_and_see_the_rest(cls):
    class Tagged(cls):
        def __new__(made, data=None, *, tag="none", **options):
            self = super().__new__(made, data, requires_grad=False, **options)
            self.tag = tag
            return self

    with patches.applied(ID):
        one, two = Tagged(torch.ones(2), tag="mine", mark=1), Tagged()
        assert (type(one), one.tag, two.tag, two.shape) == (Tagged, "mine", "none", (0,))
        assert "mark" not in vars(one)
        with pytest.raises(TypeError, match="multiple values"):
            cls(torch.ones(2), data=torch.ones(2))


def test_a_construction_in_a_graph():
    """Dynamo traces the constructor of ``Int8Params``, before and after."""
    x = torch.randn(4, 2)

    def made(x):
        weight = bnb.nn.Int8Params(x, requires_grad=False, SCB=x[:, 0])
        return weight.float() * weight.SCB[:, None]

    def marked(x):
        return bnb.nn.Int8Params(x, requires_grad=False, mark=1).float() * 2

    with patches.applied(ID):
        for function in (made, marked):
            assert torch.equal(torch.compile(function, fullgraph=True, backend="eager")(x), function(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_accelerate_remakes_a_marked_parameter(bits):
    from accelerate.utils import set_module_tensor_to_device

    torch.manual_seed(0)
    if bits == 4:
        layer = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    else:
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    x = torch.randn(2, 64)
    codes = layer.weight.data.clone()
    layer.weight.mark = "left by another library"
    with patches.applied(ID):
        set_module_tensor_to_device(layer, "weight", torch.device("cpu"), value=layer.weight.data)
        assert type(layer.weight) in (bnb.nn.Params4bit, bnb.nn.Int8Params)
        assert torch.equal(layer.weight.data, codes) and layer(x).isfinite().all()
