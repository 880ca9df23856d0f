"""A single file of plain weights is quantized as a folder is, and the model is saved and loaded."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.repairs.reproducers import image_models

from . import image_options

diffusers = pytest.importorskip("diffusers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ID = "diffusers-single-file-not-quantized"
BOTH = pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)


def single_file(flux, folder, dtype=torch.bfloat16, change=None):
    tensors = image_options.load(flux, None, dtype).state_dict()
    if change is not None:
        change(tensors)
    safetensors_torch.save_file(tensors, folder / "flux.safetensors")
    return str(folder / "flux.safetensors")


def load(file, flux, how):
    config = diffusers.BitsAndBytesConfig(**how)
    with patches.applied(ID), image_models.as_with_gpu():
        return diffusers.FluxTransformer2DModel.from_single_file(
            file, config=str(flux), quantization_config=config, torch_dtype=torch.bfloat16
        )


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_the_model_that_from_pretrained_gives(flux, tmp_path, how, dtype):
    expected = image_options.load(flux, how)
    model = load(single_file(flux, tmp_path, dtype), flux, how)
    for name, weight in image_options.packed(expected).items():
        assert torch.equal(model.get_parameter(name).data, weight) or dtype is torch.float32
    if dtype is torch.bfloat16:
        assert torch.equal(image_options.output(model), image_options.output(expected))
    assert image_options.packed(model).keys() == image_options.packed(expected).keys()


@BOTH
def test_it_is_saved_and_loaded(flux, tmp_path, how):
    model = load(single_file(flux, tmp_path), flux, how)
    model.save_pretrained(tmp_path / "saved")
    again = image_options.load(tmp_path / "saved")
    assert image_options.packed(again).keys() == image_options.packed(model).keys()
    assert torch.equal(image_options.output(again), image_options.output(model))


@BOTH
def test_a_file_with_values_of_one_byte_gives_the_same_error(flux, tmp_path, how):
    def change(tensors):
        tensors["x_embedder.weight"] = tensors["x_embedder.weight"].to(torch.int8)

    with pytest.raises(ValueError, match="bitsandbytes__|SCB"):
        load(single_file(flux, tmp_path, change=change), flux, how)
