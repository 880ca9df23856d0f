"""Scales and codes that a user replaces are the ones that everybody reads from then on: there is no second place."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import accelerate
import bitsandbytes as bnb
import peft
import pytest
import torch

import patches
from patches.engine.gate import satisfied

X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
CPU = torch.device("cpu")


def linear(seed: int = 0, warm: bool = True) -> bnb.nn.Linear8bitLt:
    torch.manual_seed(seed)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()
    if warm:
        layer(X)
    return layer


def copied(layer):
    return copy.deepcopy(layer)


def unpickled(layer):
    return pickle.loads(pickle.dumps(layer))


def loaded_whole(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


LAYERS = {
    "ran": linear,
    "copied": lambda: copied(linear()),
    "unpickled": lambda: unpickled(linear()),
    "from a file": lambda: loaded_whole(linear()),
    "moved": lambda: linear().to("cpu"),
    "cast": lambda: linear().half(),
    "of inference mode": lambda: torch.inference_mode()(linear)(),
}


def saved_and_loaded(layer, folder):
    other = linear(1, warm=False)
    other.load_state_dict(layer.state_dict())
    return other(X)


def offloaded(layer, folder):
    model = accelerate.cpu_offload(torch.nn.Sequential(layer), execution_device=CPU)
    first = model(X)
    assert torch.equal(model(X), first)
    return first


def on_disk(layer, folder):
    return accelerate.disk_offload(torch.nn.Sequential(layer), folder, execution_device=CPU)(X)


def under_a_hook(layer, folder):
    hook = accelerate.hooks.AlignDevicesHook(CPU, offload=True)
    return accelerate.hooks.add_hook_to_module(layer, hook)(X)


def adapter(layer):
    base = torch.nn.Sequential(layer)
    base.is_loaded_in_8bit = True
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))


def merged_and_unmerged(layer, folder):
    model = adapter(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
        model.unmerge_adapter()
        with model.disable_adapter():
            return model(X)


def compiled(layer, folder):
    return torch.compile(layer, fullgraph=True, backend="aot_eager")(X)


def by_hand(layer, folder):
    """The habit of who reads scales: the weight's, and if it has none the state's."""
    weight = layer.weight
    scale = weight.SCB if weight.SCB is not None else layer.state.SCB
    return bnb.functional.int8_vectorwise_dequant(weight.data, scale) @ X.T


def of_a_copied_weight(layer, folder):
    weight = copy.deepcopy(layer.weight)
    return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB) @ X.T


def of_a_moved_weight(layer, folder):
    weight = layer.weight.to("cpu")
    return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB) @ X.T


def of_pieces(layer, folder):
    pieces = layer.weight.chunk(2)
    return torch.cat([bnb.functional.int8_vectorwise_dequant(piece.data, piece.SCB) for piece in pieces]) @ X.T


READERS = {
    f.__name__: f for f in (
        saved_and_loaded, offloaded, on_disk, under_a_hook, merged_and_unmerged, compiled, by_hand, of_a_copied_weight,
        of_a_moved_weight, of_pieces,
    )
}  # fmt: skip
AFTER = {"as is": lambda it: it, "copied": copied, "from a file": loaded_whole, "cast": lambda it: it.float()}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("made", LAYERS)
def test_scales_that_were_replaced_are_read_everywhere(made, read, tmp_path):
    with patches.applied():
        layer = LAYERS[made]()
        expected = READERS[read](linear(), tmp_path / "one")
        layer.state.SCB = layer.state.SCB * 2
        got = READERS[read](layer, tmp_path / "two")
    assert torch.allclose(got, 2 * expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("then", AFTER)
def test_scales_that_were_replaced_are_kept_by_what_is_done_then(then):
    with patches.applied():
        layer = linear()
        expected = layer(X)
        layer.state.SCB = layer.state.SCB * 2
        layer = AFTER[then](layer)
        assert torch.equal(layer(X), 2 * expected)
        other = linear(1, warm=False)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(X), 2 * expected)


def test_scales_that_are_set_on_the_weight_are_those_of_the_layer():
    with patches.applied():
        layer = linear()
        expected = layer(X)
        layer.weight.SCB = layer.weight.SCB * 2
        assert torch.equal(layer(X), 2 * expected) and layer.weight.SCB is layer.state.SCB


@pytest.mark.parametrize("then", AFTER)
def test_rows_that_were_permuted_stay_permuted(then):
    order = torch.arange(64).flip(0)
    with patches.applied():
        layer = linear()
        expected = layer(X)[:, order]
        layer.state.CB, layer.state.SCB = layer.state.CB[order].contiguous(), layer.state.SCB[order].contiguous()
        layer = AFTER[then](layer)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(X), expected)
        assert torch.equal(layer(X), expected)
        assert torch.equal(saved_and_loaded(layer, None), expected)


def test_a_weight_that_left_its_layer_does_not_show_the_scales_of_the_next_one():
    with patches.applied():
        layer = linear()
        old = layer.weight
        assert old.SCB is layer.state.SCB
        layer.weight = linear(1, warm=False).weight
        assert old.SCB is None, "as without the plugin"
        layer(X)
        assert old.SCB is None


def test_weights_can_be_swapped():
    """torch refuses that for tensors that someone refers to weakly."""
    with patches.applied():
        one, two = linear(), linear(1, warm=False)
        expected = two(X)
        two = linear(1, warm=False)
        torch.utils.swap_tensors(one.weight, two.weight)
        assert torch.equal(one(X), expected)


def test_after_a_revert_scales_are_where_bitsandbytes_has_them():
    with patches.applied():
        layer = linear()
        expected = layer(X)
    assert vars(layer.weight)["SCB"] is None and layer.weight.SCB is None
    assert torch.equal(layer.state_dict()["SCB"], layer.state.SCB) and torch.equal(layer(X), expected)


def test_nothing_is_kept_of_layers_that_are_gone():
    from patches.repairs.helpers import int8_settled

    with patches.applied():
        for _ in range(600):
            layer = bnb.nn.Linear8bitLt(8, 8, bias=False, has_fp16_weights=False).to("cpu")
            layer(torch.ones(1, 8))
        assert len(int8_settled._homes) <= 256


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_a_quantized_state_dict_is_refused_by_a_layer_with_a_new_weight(warm, moved):
    with patches.applied():
        saved = {name: t.clone() for name, t in linear().state_dict().items()}
        layer = linear(1, warm)
        layer.weight = bnb.nn.Int8Params(torch.randn(64, 64), requires_grad=False)
        with pytest.raises(RuntimeError, match="non-quantized Linear8bitLt is not supported"):
            layer.load_state_dict(saved)
        if moved:  # what is loaded into a quantized one is right
            layer.weight = bnb.nn.Int8Params(torch.randn(64, 64), requires_grad=False)
            layer.to("cpu").load_state_dict(saved)
            assert torch.equal(layer(X), linear()(X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scales_are_loaded_as_they_are_whatever_the_default_dtype_is(dtype):
    with patches.applied():
        layer = linear()
        expected, saved = layer(X), layer.state_dict()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                other = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).eval()
            other.load_state_dict(saved, assign=True)
            assert other.state_dict()["SCB"].dtype is torch.float32
            assert torch.equal(other(X), expected)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(satisfied("bitsandbytes>=0.50"), reason="0.50 saves such a layer itself")
def test_a_plain_weight_is_saved_with_its_own_scales_or_none():
    with patches.applied():
        layer = linear()
        layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
        assert "SCB" in layer.state_dict()
        layer.weight = torch.nn.Parameter(layer.weight.data.flip(0), requires_grad=False)
        with pytest.raises(RuntimeError, match="codes that are not the layer's own"):
            layer.state_dict()
        layer.weight = torch.nn.Parameter(torch.randn(64, 64))
        assert list(layer.state_dict()) == ["weight"]


def test_a_weight_that_is_assigned_with_its_scales_is_the_one_that_is_computed_with():
    with patches.applied():
        layer, other = linear(), linear(1, warm=False)
        expected = linear(1)(X)
        layer.weight = bnb.nn.Int8Params(other.weight.data, requires_grad=False, SCB=other.weight.SCB)
        assert torch.equal(saved_and_loaded(layer, None), expected)
        assert torch.equal(layer(X), expected)


@pytest.mark.parametrize("how", ["assigned", "written"])
@pytest.mark.parametrize("read", ["saved_and_loaded", "offloaded", "merged_and_unmerged"])
def test_codes_of_another_layer_under_the_scales_of_this_one_are_not_saved(how, read, tmp_path):
    """``layer.weight`` and ``layer.state.CB`` are two layers then, and one of them has no scales."""
    codes = linear(1, warm=False).weight.data
    with patches.applied():
        model = torch.nn.ModuleDict({"head": linear()})
        layer = model["head"]
        if how == "assigned":
            layer.weight = bnb.nn.Int8Params(codes, requires_grad=False)
        else:
            layer.weight.data = codes
        with pytest.raises(RuntimeError, match="two different sets of INT8 codes: layer.weight and layer.state.CB"):
            READERS[read](layer, tmp_path)
        assert torch.equal(layer.weight.data, codes)


def test_codes_that_were_replaced_with_their_scales_are_saved():
    order = torch.arange(64).flip(0)
    with patches.applied():
        layer = linear()
        expected = layer(X)[:, order]
        layer.weight.data, layer.state.SCB = layer.weight.data[order].contiguous(), layer.state.SCB[order].contiguous()
        assert torch.equal(saved_and_loaded(layer, None), expected)


def test_a_copy_that_has_not_run_computes_with_what_it_loads():
    with patches.applied():
        layer = copy.deepcopy(linear())
        layer.load_state_dict(linear(1).state_dict())
        assert torch.equal(layer(X), linear(1)(X))


def test_new_codes_without_scales_never_take_those_of_the_codes_before():
    with patches.applied():
        layer = linear()
        codes = linear(1, warm=False).weight.data
        layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, CB=codes)
        with pytest.raises(RuntimeError, match="not their row scales"):
            layer(X)
