"""4-bit layers that a program loads from the files of a checkpoint, one by one with strict=False."""

from __future__ import annotations

import copy

import pytest
import torch

import patches
from tests.repairs.bitsandbytes.four_bit.test_linear4bit_load_state_dict import layer, output

ID = "bitsandbytes-linear4bit-load-state-dict"


@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
@pytest.mark.parametrize("order", [1, -1], ids=["", "reversed"])
@pytest.mark.parametrize("last", ["weight", "weight.absmax", "weight.nested_absmax", "weight.quant_map"])
def test_the_files_of_a_checkpoint_are_loaded_one_by_one(last, order, ran):
    """The first ends with ``last``, in the order of the state dict."""
    saved = layer(0)
    tensors = {key: tensor.clone() for key, tensor in saved.state_dict().items()}
    cut = list(tensors).index(last) + 1
    files = [dict([*tensors.items()][:cut]), dict([*tensors.items()][cut:])][::order]
    with patches.applied(ID):
        live = layer(1)
        if ran:
            output(live)
        live.load_state_dict(files[0], strict=False)
        with pytest.raises(RuntimeError, match=r"Linear4bit .* was loaded in parts.*lacks '.*Load the file"):
            output(live)
        assert not live.load_state_dict(files[1], strict=False).unexpected_keys
        assert torch.equal(output(live), output(saved))
        assert live.state_dict().keys() == tensors.keys()
        live.load_state_dict(layer(2).state_dict())
        assert torch.equal(output(live), output(layer(2))), "what came in parts is forgotten"


def test_a_part_that_is_what_the_layer_has_counts_when_the_rest_is_not():
    """The quantization map is the same for each layer."""
    saved = layer(0)
    tensors = {key: tensor.clone() for key, tensor in saved.state_dict().items()}
    with patches.applied(ID):
        live = layer(1)
        expected = output(layer(1))
        live.load_state_dict({"weight.quant_map": tensors.pop("weight.quant_map")}, strict=False)
        assert torch.equal(output(live), expected)
        live.load_state_dict({"weight": tensors.pop("weight")}, strict=False)
        live.load_state_dict(tensors, strict=False)
        assert torch.equal(output(live), output(saved))


def test_another_quantization_state_ends_what_was_loaded_in_parts():
    with patches.applied(ID):
        live, other = layer(1), layer(2)
        live.load_state_dict({"weight": layer(0).state_dict()["weight"]}, strict=False)
        live.weight = copy.deepcopy(other.weight)
        live.quant_state = live.weight.quant_state
        live.load_state_dict({"bias": other.bias.detach()}, strict=False)
        assert torch.equal(output(live), output(other))
        rest = {k: v for k, v in layer(0).state_dict().items() if k not in ("weight", "bias")}
        live.load_state_dict(rest, strict=False)
        with pytest.raises(RuntimeError, match="lacks 'weight'"):
            output(live)


def test_a_bias_that_is_missing_keeps_no_weight_from_being_loaded():
    saved, live = layer(0), layer(1)
    tensors = saved.state_dict()
    del tensors["bias"]
    live.bias.data.copy_(saved.bias)
    with patches.applied(ID):
        assert live.load_state_dict(tensors, strict=False).missing_keys == ["bias"]
        assert torch.equal(output(live), output(saved))
