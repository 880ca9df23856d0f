"""INT8 codes that arrive without their scales are refused; what arrived well before arrives as before."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt

import patches

ID = "bitsandbytes-int8-codes-without-scales"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))


def model(seed: int, fp16: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(Linear8bitLt(64, 32, has_fp16_weights=fp16)).requires_grad_(False)


def codes_alone(saved: torch.nn.Module) -> dict:
    return {name: p.data.clone() for name, p in saved.named_parameters()}


@pytest.mark.parametrize("strict", [True, False])
def test_codes_alone_are_refused_by_name_and_change_nothing(strict):
    saved, live = model(0).to("cpu"), model(1).to("cpu")
    before, untouched = live.state_dict(), model(1).to("cpu")(X)
    before = {k: v.clone() for k, v in before.items()}
    with patches.applied(ID), pytest.raises(RuntimeError, match=r"INT8 weight '0.weight': .* no '0.SCB'"):
        live.load_state_dict(codes_alone(saved), strict=strict)
    assert all(torch.equal(before[k], v) for k, v in live.state_dict().items())
    assert torch.equal(live(X), untouched)


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
