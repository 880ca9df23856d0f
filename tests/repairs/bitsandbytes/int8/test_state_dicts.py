"""What INT8 layers save they load, by every route, onto quantized, used, and meta layers."""

from __future__ import annotations

import copy

import bitsandbytes as bnb
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call

import patches

LOAD = "bitsandbytes-int8-load-state-dict"
NAMES = "bitsandbytes-int8-state-dict-names"
META = "bitsandbytes-int8-meta-moves"
CAST = "bitsandbytes-int8-cast-loses-scale"
X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
SINCE_48 = hasattr(bnb.nn.Linear8bitLt, "to") and "to" in vars(bnb.nn.Linear8bitLt)


def model(seed: int = 0, warm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    found = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)).requires_grad_(False)
    found = found.to("cpu").eval()
    if warm:
        found(X)
    return found


def saved(seed: int = 0, warm: bool = False) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model(seed, warm).state_dict().items()}


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("saved_warm", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_quantized_layer_loads_what_another_saved(warm, saved_warm, assign):
    expected = model(seed=1)(X)
    with patches.applied(LOAD):
        found = model(warm=warm)
        loaded = found.load_state_dict(saved(1, saved_warm), assign=assign)
        assert not loaded.missing_keys and not loaded.unexpected_keys
        assert torch.equal(found(X), expected) and torch.equal(found(X), expected)
        assert isinstance(found[0].weight, bnb.nn.Int8Params)
        assert all(map(torch.equal, found.state_dict().values(), saved(1).values()))


@pytest.mark.parametrize("first", [lambda m: m(X), lambda m: m.load_state_dict(saved(1), assign=True)])
def test_a_layer_that_was_given_another_weight_holds_nothing_of_the_one_before(first):
    with patches.applied(LOAD, "bitsandbytes-int8-plain-weight"):
        found = model()
        first(found)
        found.load_state_dict(saved(1), assign=True)
        assert found[0].state.CB is None and found[0].state.SCB is None
        assert torch.equal(found(X), model(seed=1)(X))


def test_a_meta_layer_loads_with_assign():
    expected = model()(X)
    with patches.applied(LOAD):
        found = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, device="meta")).eval()
        found.load_state_dict(saved(), assign=True)
        assert torch.equal(found(X), expected)


def test_codes_for_a_layer_that_is_not_quantized_are_still_refused():
    found = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False))
    with patches.applied(LOAD), pytest.raises(RuntimeError, match="non-quantized Linear8bitLt is not supported"):
        found.load_state_dict(saved())


@pytest.mark.parametrize("warm", [True, False])
def test_distributed_checkpoint_saves_and_loads(warm):
    with patches.applied(NAMES, LOAD):
        state = get_model_state_dict(model(1, warm))
        assert list(state) == list(model().state_dict())
        found = model(warm=warm)
        set_model_state_dict(found, state)
        assert torch.equal(found(X), model(1)(X))


@pytest.mark.parametrize("warm", [True, False])
def test_functional_call_takes_a_whole_state_dict(warm):
    with patches.applied(NAMES, "bitsandbytes-int8-plain-weight"):
        found, expected = model(warm=warm), model(1)(X)
        assert torch.equal(functional_call(found, saved(1), (X,)), expected)
        assert torch.equal(found(X), model()(X)), "the layer kept the weight of the call"


def test_layers_that_are_not_quantized_have_no_scale_attribute():
    with patches.applied(NAMES):
        assert not hasattr(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False), "SCB")
        assert not hasattr(bnb.nn.Linear8bitLt(64, 32), "weight_format")
        assert torch.equal(model()[0].SCB, saved()["0.SCB"])


@pytest.mark.parametrize("warm", [True, False])
def test_to_meta_and_back(warm):
    with patches.applied(META, LOAD):
        found = model(warm=warm)
        identity = found[0].weight.requires_grad
        found.to("meta")
        layer = found[0]
        assert {type(layer.weight), type(layer.to("meta").weight)} == {bnb.nn.Int8Params}
        tensors = (layer.weight, layer.weight.CB, layer.weight.SCB, layer.state.CB, layer.state.SCB)
        assert all(t is None or t.device.type == "meta" for t in tensors), "something stayed"
        found.to_empty(device="cpu").load_state_dict(saved())
        assert torch.equal(found(X), model()(X)) and found[0].weight.requires_grad is identity


def test_to_meta_before_quantization_and_the_embedding():
    with patches.applied(META, "bitsandbytes-int8-scales-lost-on-offload"):
        layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False).to("meta")
        assert type(layer.weight) is bnb.nn.Int8Params and layer.weight.dtype == torch.float32
        table = bnb.nn.Embedding8bit(16, 64).to("cpu")
        expected = table(torch.arange(4))
        assert torch.equal(table.to("cpu")(torch.arange(4)), expected)
        assert table.to("meta").weight.SCB.device.type == "meta"


@pytest.mark.parametrize("warm", [True, False])
def test_sound_moves_and_casts_stay_bit_identical(warm):
    def moved() -> list[torch.Tensor]:
        found = []
        for move in (lambda m: m.to("cpu"), lambda m: m.half().float(), copy.deepcopy, lambda m: m.to(torch.float64)):
            m = move(model(warm=warm))
            found += [m(X).detach(), *m.state_dict().values()]
        return found

    if not SINCE_48:
        pytest.skip("before 0.48, .to('cpu') of a quantized layer quantizes its codes: int8-requantized-codes")
    before = moved()
    with patches.applied(META, LOAD, NAMES, CAST):
        assert all(map(torch.equal, moved(), before))


@pytest.mark.skipif(not SINCE_48, reason="the scales are dropped from 0.48 on")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
def test_a_cast_keeps_the_scales_in_their_own_dtype(dtype):
    weight = model()[0].weight
    assert weight.to(dtype).SCB is None
    with patches.applied(CAST):
        cast = weight.to(dtype)
        assert torch.equal(cast.SCB, weight.SCB) and torch.equal(cast.float(), weight.float())
        assert weight.to("meta").SCB.device.type == "meta"
        assert weight.to("meta").to("meta").SCB is not None
