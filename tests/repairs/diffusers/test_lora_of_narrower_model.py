"""A LoRA of FLUX is loaded into a Control model, in 4 bits as in INT8 and unquantized."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.repairs.reproducers import image_models

from . import image_options

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

ID = "diffusers-lora-of-narrower-model"
A, B = torch.randn(4, 64), torch.randn(64, 4)


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    folder = tmp_path_factory.mktemp("control")
    image_models.save_flux(str(folder), in_channels=128)
    return folder


def loaded(folder, how):
    """The model with the adapter, and how much the adapter adds to the output of its first layer."""
    model = image_options.load(folder, how, torch.float32)
    x = torch.randn(3, model.config.in_channels, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model.x_embedder(x)
    others = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), transformer=model, **others)
    with patches.applied(ID):
        pipe.load_lora_weights({"transformer.x_embedder.lora_A.weight": A, "transformer.x_embedder.lora_B.weight": B})
    with torch.no_grad():
        added = model.x_embedder(x) - before
    return model.x_embedder.lora_A["default_0"].weight, added, x[:, :64] @ A.T @ B.T


@pytest.mark.parametrize("how", [*image_options.BOTH.values(), None], ids=[*image_options.BOTH, "plain"])
def test_the_first_channels_get_the_adapter_and_the_others_none(control, how):
    weight, added, expected = loaded(control, how)
    assert weight.shape == (4, 128)
    assert torch.equal(weight[:, :64], A.to(weight.dtype)) and not weight[:, 64:].any()
    assert ((added - expected).norm() / expected.norm()).item() < 0.02


def test_a_layer_of_the_same_width_gets_it_as_it_is(flux):
    weight, added, expected = loaded(flux, image_options.NF4)
    assert torch.equal(weight, A.to(weight.dtype))
    assert ((added - expected).norm() / expected.norm()).item() < 0.02
