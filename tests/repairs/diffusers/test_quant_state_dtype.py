"""4-bit layers of an image model dequantize in the dtype that was asked for."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch

import patches

from . import image_options

pytest.importorskip("diffusers")

ID = "diffusers-quant-state-dtype"


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("asked", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_states_have_it_and_packed_weights_are_the_same(flux, tmp_path, double, asked):
    first = image_options.load(flux, {**image_options.NF4, "bnb_4bit_use_double_quant": double})
    first.save_pretrained(tmp_path)
    with patches.applied(ID):
        model = image_options.load(tmp_path, None, asked)
    for name, before in image_options.packed(first).items():
        weight, origin = model.get_parameter(name), first.get_parameter(name).quant_state
        assert weight.quant_state.dtype is asked and torch.equal(weight.data, before)
        assert torch.equal(weight.quant_state.absmax, origin.absmax)
        values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert values.dtype is asked
        origin.dtype = asked
        assert torch.equal(values, bitsandbytes.functional.dequantize_4bit(before, origin))


@pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)
def test_other_models_are_the_same(flux, tmp_path, how):
    """Quantized while it loads, and of a checkpoint in its own dtype."""
    expected = image_options.load(flux, how)
    expected.save_pretrained(tmp_path)
    with patches.applied(ID):
        models = image_options.load(flux, how), image_options.load(tmp_path)
    for model in models:
        assert torch.equal(image_options.output(model), image_options.output(expected))


def test_a_plain_model_is_loaded_as_before(flux):
    expected = image_options.load(flux)
    with patches.applied(ID):
        model = image_options.load(flux)
    assert torch.equal(image_options.output(model), image_options.output(expected))
