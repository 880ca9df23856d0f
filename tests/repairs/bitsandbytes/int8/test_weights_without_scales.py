"""INT8 codes that arrive without their scales are refused; what arrived well before arrives as before."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt

import patches

ID = "bitsandbytes-int8-weights-without-scales"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))


def model(seed: int, fp16: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(Linear8bitLt(64, 32, has_fp16_weights=fp16)).requires_grad_(False)


def codes_alone(saved: torch.nn.Module) -> dict:
    return {name: p.data.clone() for name, p in saved.named_parameters()}


def test_codes_alone_are_refused_by_name_and_change_nothing():
    saved, live = model(0).to("cpu"), model(1).to("cpu")
    before, untouched = live.state_dict(), model(1).to("cpu")(X)
    before = {k: v.clone() for k, v in before.items()}
    with patches.applied(ID), pytest.raises(RuntimeError, match=r"INT8 weight '0.weight': .* no '0.SCB'"):
        live.load_state_dict(codes_alone(saved))
    assert all(torch.equal(before[k], v) for k, v in live.state_dict().items())
    assert torch.equal(live(X), untouched)


@pytest.mark.parametrize("ids", [(ID,), (ID, "bitsandbytes-int8-load-state-dict"), ()], ids=["alone", "two", "all"])
@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
@pytest.mark.parametrize("first", ["weight", "SCB"])
def test_the_files_of_a_checkpoint_are_loaded_one_by_one(first, ran, ids):
    if ran and first == "SCB" and ids == (ID,):
        pytest.skip("a layer that has run loads scales with bitsandbytes-int8-load-state-dict only")
    saved = model(0).to("cpu")
    expected = copy.deepcopy(saved)(X)
    tensors = {key: tensor.clone() for key, tensor in saved.state_dict().items()}
    files = [{key: tensor for key, tensor in tensors.items() if (key == f"0.{first}") is one} for one in (True, False)]
    with patches.applied(*ids):
        live = model(1).to("cpu")
        if ran:
            live(X)
        live.load_state_dict(files[0], strict=False)
        if first == "weight":
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match="Linear8bitLt '0' has a packed INT8 weight without its row scales"
                ):
                    live(X)
        live.load_state_dict(files[1], strict=False)
        for _ in range(2):
            assert torch.equal(live(X), expected)
        assert all(torch.equal(tensors[key], tensor) for key, tensor in live.state_dict().items())
        with pytest.raises(RuntimeError, match="no '0.SCB'"):
            live.load_state_dict(codes_alone(model(2).to("cpu")))
        assert torch.equal(live(X), expected)


def test_scales_that_are_loaded_alone_let_in_the_next_packed_weights_only():
    saved, other = (model(seed).to("cpu") for seed in (0, 2))
    with patches.applied():
        live = model(1).to("cpu")
        for alone in ("SCB", "weight"):
            live.load_state_dict({f"0.{alone}": saved.state_dict()[f"0.{alone}"].clone()}, strict=False)
        live.load_state_dict({"0.bias": saved[0].bias.detach().clone()}, strict=False)
        assert torch.equal(live(X), saved(X))
        live.load_state_dict(codes_alone(other), strict=False)
        with pytest.raises(RuntimeError, match="without its row scales"):
            live(X)


def test_a_quantized_state_dict_for_a_layer_in_floats_is_refused_before_anything_is_copied():
    saved, live = model(0).to("cpu").state_dict(), model(1)
    before = live[0].weight.detach().clone()
    with patches.applied(ID), pytest.raises(RuntimeError, match=r"'0.weight': Loading a quantized .* torch.float32"):
        live.load_state_dict(saved)
    assert torch.equal(live[0].weight, before)


def test_the_codes_that_are_there_are_accepted():
    live = model(1).to("cpu")
    before = model(1).to("cpu")(X)
    with patches.applied(ID):
        live.load_state_dict(codes_alone(live))
    assert torch.equal(live(X), before)


def test_codes_into_a_layer_that_is_not_quantized_are_refused():
    with patches.applied(ID), pytest.raises(RuntimeError, match="no '0.SCB'"):
        model(1).load_state_dict(codes_alone(model(0).to("cpu")))


def test_whole_state_dicts_floats_adapters_and_fp16_layers_load_as_before():
    saved, live = model(0).to("cpu"), model(1).to("cpu")
    with patches.applied(ID):
        live.load_state_dict(saved.state_dict())
        floats = model(1)
        floats.load_state_dict(model(0).state_dict())
        floats.load_state_dict({"0.bias": torch.ones(32)}, strict=False)
        full = model(1, fp16=True)
        full.load_state_dict(model(0, fp16=True).state_dict())
    assert torch.equal(live(X), saved(X))
    assert torch.equal(floats[0].weight.data, model(0)[0].weight.data) and floats[0].bias.eq(1).all()
    assert torch.equal(full[0].weight.data, model(0, fp16=True)[0].weight.data)


@pytest.mark.parametrize("warm", [True, False])
def test_unquantized_weights_for_a_quantized_layer_are_an_error_that_changes_nothing(warm):
    """torch copies them by value: -0.1 becomes the code 0."""
    expected = model(0).to("cpu")(X)
    with patches.applied(ID):
        live = model(0).to("cpu")
        saved = live.state_dict()
        if warm:
            live(X)
        with pytest.raises(RuntimeError, match="'0.weight': the layer is quantized.*Load it before"):
            live.load_state_dict({**saved, "0.weight": torch.randn(32, 64)}, strict=False)
        assert torch.equal(live(X), expected)
        fresh = model(1).to("cpu")
        fresh.load_state_dict({**saved, "0.weight": saved["0.weight"].float()})
        assert torch.equal(fresh(X), expected), "codes that were cast to floats are the same codes"
