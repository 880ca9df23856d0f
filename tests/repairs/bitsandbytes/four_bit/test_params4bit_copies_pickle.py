"""What is saved as a 4-bit weight comes back as one, with or without the patch at hand."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit

import patches

ID = "bitsandbytes-params4bit-copies"


def make(nested: bool = True, **options) -> Linear4bit:
    torch.manual_seed(0)
    return Linear4bit(64, 128, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested, **options)


def saved(thing: object) -> object:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(thing: object) -> object:
    return pickle.loads(pickle.dumps(thing))


HOW = pytest.mark.parametrize("how", [saved, pickled])


@HOW
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=["uint8", "bfloat16"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_a_quantized_layer(nested, storage, how, device):
    layer = make(nested, quant_storage=storage).to(device)
    with patches.applied(ID):
        loaded = how(layer)
    weight = loaded.weight
    assert type(weight) is Params4bit and not weight.requires_grad
    assert weight.module is loaded and loaded.quant_state is weight.quant_state
    for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized"):
        assert getattr(weight, name) == getattr(layer.weight, name)
    assert loaded.state_dict().keys() == layer.state_dict().keys()
    same = (torch.equal(*pair) for pair in zip(loaded.state_dict().values(), layer.state_dict().values()))
    if storage == torch.uint8:  # others hold bit patterns that are no numbers
        assert all(same)
    assert torch.equal(weight.data.view(torch.uint8), layer.weight.data.view(torch.uint8))


@HOW
def test_a_layer_that_is_not_quantized_yet(how, device):
    layer = make()
    with patches.applied(ID):
        loaded = how(layer).to(device)
    x = torch.randn(2, 64, device=device)
    assert loaded.weight.bnb_quantized and layer.quant_state is None
    assert torch.equal(loaded(x), layer.to(device)(x))


@HOW
def test_a_weight_alone(how, device):
    weight = make().to(device).weight
    with patches.applied(ID):
        loaded = how(weight)
    assert type(loaded) is Params4bit
    assert torch.equal(loaded.data, weight.data) and torch.equal(loaded.quant_state.absmax, weight.quant_state.absmax)


def test_tied_weights_stay_tied_and_shared_storage_is_saved_once(device):
    model = torch.nn.Sequential(make(), make()).to(device)
    model[1].weight = model[0].weight
    with patches.applied(ID):
        loaded = saved(model)
    assert loaded[1].weight is loaded[0].weight


def test_loads_without_the_patch(forked, tmp_path):
    with patches.applied(ID):
        torch.save(make().to("cpu"), tmp_path / "layer.pt")
    assert b"patches" not in (tmp_path / "layer.pt").read_bytes()
    script = """
        import sys, torch
        layer = torch.load(sys.argv[1], weights_only=False)
        print(type(layer.weight).__name__, layer.weight.quant_state is not None)
    """
    assert forked(script, str(tmp_path / "layer.pt")).split() == ["Params4bit", "True"]
