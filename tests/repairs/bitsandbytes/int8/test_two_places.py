"""Where the weight and the state of an INT8 layer hold different codes: the newer ones, or an error that names it."""

from __future__ import annotations

import copy

import bitsandbytes as bnb
import pytest
import torch

import patches

from .readers import READERS, X, linear, saved_and_loaded


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
        with pytest.raises(RuntimeError, match="two different packed INT8 weights: layer.weight, and layer.state.CB"):
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
        with pytest.raises(RuntimeError, match="without its row scales"):
            layer(X)
