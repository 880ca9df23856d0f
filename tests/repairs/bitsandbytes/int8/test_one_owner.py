"""Scales and codes that a user replaces are the ones that everybody reads from then on: there is no second place."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

import patches
from patches.engine.gate import satisfied

from .readers import AFTER, LAYERS, READERS, X, linear, saved_and_loaded

pytestmark = pytest.mark.one_in(2)


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


def test_reading_the_inputs_of_a_graph_is_not_compiled_itself():
    """`fullgraph=True` cannot see it: Dynamo looks at the frames that read the scales only without it."""
    from torch._dynamo.utils import counters

    with patches.applied():
        layer = torch.nn.Sequential(linear())
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(layer, backend="aot_eager")
        assert torch.equal(compiled(X), compiled(X))
        assert counters["stats"]["unique_graphs"] == 1 and counters["frames"] == {"total": 1, "ok": 1}
        assert not counters["graph_break"]


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
    from patches.quantized.int8 import scale_ownership

    with patches.applied():
        for _ in range(600):
            layer = bnb.nn.Linear8bitLt(8, 8, bias=False, has_fp16_weights=False).to("cpu")
            layer(torch.ones(1, 8))
        assert len(scale_ownership._ownerships) <= 256


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
        with pytest.raises(RuntimeError, match="differs from the packed weight of the layer"):
            layer.state_dict()
        layer.weight = torch.nn.Parameter(torch.randn(64, 64))
        assert list(layer.state_dict()) == ["weight"]
