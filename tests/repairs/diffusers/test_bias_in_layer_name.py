"""Packed weights of layers that are called "bias" load, and a wrong shape is still refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import patches
from patches.repairs.reproducers import image_models

from . import image_options

ID = "diffusers-bias-in-layer-name"
SIZES = dict(input_dims=16, targets_length=16, d_model=64, num_layers=1, num_heads=2, d_kv=32, d_ff=64)
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def film(tmp_path):
    """The folder of a decoder in 4 bits."""
    from diffusers import BitsAndBytesConfig, T5FilmDecoder

    torch.manual_seed(0)
    T5FilmDecoder(**SIZES).save_pretrained(tmp_path / "base")
    load(tmp_path / "base", quantization_config=BitsAndBytesConfig(**image_options.NF4)).save_pretrained(tmp_path)
    return tmp_path


def load(folder, **also):
    from diffusers import T5FilmDecoder

    with image_models.as_with_gpu():
        return T5FilmDecoder.from_pretrained(folder, torch_dtype=torch.bfloat16, device_map="cpu", **also)


def test_the_layer_that_was_saved(film):
    with pytest.raises(ValueError, match="scale_bias.weight"):
        load(film)
    with patches.applied(ID):
        model = load(film)
    stored = load_file(film / FILE)
    name = "decoders.0.layer.0.FiLMLayer.scale_bias.weight"
    assert torch.equal(model.get_parameter(name).data, stored[name])


def test_a_wrong_shape_is_refused(film):
    tensors = load_file(film / FILE)
    name = "decoders.0.layer.0.FiLMLayer.scale_bias.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, film / FILE)
    with patches.applied(ID), pytest.raises(ValueError, match="Expected the flattened shape"):
        load(film)
