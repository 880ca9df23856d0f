"""4-bit layers to the meta device and back."""

from __future__ import annotations

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")

ID = "bitsandbytes-linear4bit-meta-moves"
STATISTICS, LOADING = "bitsandbytes-params4bit-meta", "bitsandbytes-linear4bit-load-state-dict"


def layer(seed=0, nested=True):
    torch.manual_seed(seed)
    return bnb.nn.Linear4bit(64, 96, compute_dtype=torch.float32, compress_statistics=nested, quant_type="nf4")


def output(made, device="cpu"):
    torch.manual_seed(7)
    return made(torch.randn(3, 64).to(device))


@pytest.mark.parametrize("built_on_meta", [True, False])
def test_a_layer_from_meta_quantizes_what_it_is_given(built_on_meta, device):
    expected = layer().to(device)
    with torch.device("meta" if built_on_meta else "cpu"):
        made = layer(1)
    with patches.applied(ID):
        made.to("meta").to_empty(device="cpu").load_state_dict(layer().state_dict())
        made.to(device)
    assert made.quant_state is made.weight.quant_state is not None and made.weight.module is made
    assert torch.equal(made.weight.data, expected.weight.data)
    assert torch.equal(output(made, device), output(expected, device))


@pytest.mark.parametrize("nested", [True, False])
def test_a_quantized_layer_keeps_its_statistics_and_loads_what_it_saved(nested):
    made = layer(nested=nested).to("cpu")
    expected, state = output(made), made.weight.quant_state
    saved = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    with patches.applied(ID, STATISTICS, LOADING):
        made.to("meta")
        assert type(made.weight) is bnb.nn.Params4bit and made.weight.is_meta and made.bias.is_meta
        assert made.weight.quant_state is state and not state.absmax.is_meta
        made.to_empty(device="cpu")
        assert made.weight.bnb_quantized and made.weight.quant_state is state
        made.load_state_dict(saved)
        assert torch.equal(output(made), expected)


def test_an_embedding_too():
    with torch.device("meta"):
        made = bnb.nn.Embedding4bit(32, 64, quant_type="nf4")
    torch.manual_seed(0)
    plain = torch.nn.Embedding(32, 64)
    with patches.applied(ID):
        made.to_empty(device="cpu").load_state_dict(plain.state_dict())
        made.to("cpu")
    error = (made(torch.arange(32)) - plain.weight).norm() / plain.weight.norm()
    assert made.weight.bnb_quantized and error < 0.15


def test_other_moves_and_casts_are_as_before():
    results = []
    for ids in ((), (ID,)):
        made = layer()
        parameter = made.weight
        with patches.applied(*ids) if ids else torch.no_grad():
            made.half().to("cpu").float().to(torch.device("cpu"), torch.bfloat16)
        assert made.weight is parameter
        results.append(made.state_dict())
    before, after = results
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)


def test_a_layer_compiles_under_a_default_device(device):
    """Which is a mode of torch functions: Dynamo cannot trace under one how a Params4bit answers whether it is on meta."""
    made, x = layer().to(device), torch.randn(3, 64, device=device)
    expected = made(x)
    torch._dynamo.reset()
    with patches.applied(ID), torch.device("meta"):
        assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(x), expected)
