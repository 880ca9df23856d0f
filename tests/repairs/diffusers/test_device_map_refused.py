"""A quantized image model with blocks on the CPU and the disk is the model that is loaded whole; bad maps say what is wrong."""

from __future__ import annotations

import gc

import pytest
import torch

from patches.repairs.reproducers import image_models
from tests.repairs.patched_once import unpatched  # noqa: F401

from . import image_options, offloaded_flux
from .offloaded_flux import KINDS, ON_DISK, split

kinds = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)


def train(model, steps=3):
    """The losses and the adapter after some steps of the loop of diffusers' scripts."""
    model.requires_grad_(False)
    offloaded_flux.add_lora(model)
    model.enable_gradient_checkpointing()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, inputs, losses = torch.optim.AdamW(trained, lr=1e-2), image_models.flux_inputs(torch.bfloat16), []
    for _ in range(steps):
        loss = (model(**inputs)[0].float() - 1).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach().clone() for parameter in trained]


@kinds
@pytest.mark.parametrize("kept", ["plain", "quantized", "shards", "pickled"])
def test_outputs_equal_those_of_the_whole_model(how, kept, flux, tmp_path):
    whole, folder, options = image_options.load(flux, how), flux, {}
    if kept != "plain":
        folder, how = tmp_path / "quantized", None
        options = {"max_shard_size": "40KB"} if kept == "shards" else {"safe_serialization": kept != "pickled"}
        whole.save_pretrained(folder, **options)
    also = {"use_safetensors": False} if kept == "pickled" else {}
    model = split(folder, how, tmp_path / "off", **also)
    assert model.hf_device_map == ON_DISK
    away = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert away and all(name.startswith(("transformer_blocks.", "proj_out.")) for name in away)
    for _ in range(2):
        assert torch.equal(image_options.output(model), image_options.output(whole))


@kinds
def test_training_equals_that_of_the_whole_model(how, flux, tmp_path):
    losses, adapter = train(split(flux, how, tmp_path))
    expected, tensors = train(image_options.load(flux, how))
    assert losses == expected and losses[-1] < losses[0]
    assert all(map(torch.equal, adapter, tensors))


@kinds
def test_a_quantized_checkpoint_is_read_from_where_it_lies(how, flux, tmp_path):
    image_options.load(flux, how).save_pretrained(tmp_path / "quantized")
    model = split(tmp_path / "quantized", None, None)
    index = model.proj_out._hf_hook.weights_map.dataset.index
    assert {entry["safetensors_file"] for entry in index.values()} == {
        str(tmp_path / "quantized" / "diffusion_pytorch_model.safetensors")
    }
    assert torch.isfinite(image_options.output(model)).all()


def test_the_folder_goes_with_the_model(flux, tmp_path):
    model = split(flux, KINDS["nf4"], tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_the_flag_means_what_it_meant(flux, tmp_path):
    how = {**KINDS["nf4"], "llm_int8_enable_fp32_cpu_offload": True}
    model = image_options.load(flux, how, device_map={"": "cpu"})
    assert type(model.proj_out.weight).__name__ == "Params4bit"


def test_a_model_that_is_not_quantized_loads_as_before(flux):
    model = image_options.load(flux, None, device_map={"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert torch.equal(image_options.output(model), image_options.output(image_options.load(flux)))


@pytest.mark.parametrize(
    "places, message",
    [
        ({"": "cpu", "transformer_block": "disk"}, "names 'transformer_block', which FluxTransformer2DModel does not have"),
        ({"transformer_blocks": "disk"}, "no entry for "),
        ({"": "cpu", "proj_out": "disk", "norm_out": "dsk"}, "sends 'norm_out' to 'dsk', which is not a place"),
    ],
)  # fmt: skip
def test_a_map_that_cannot_be_followed_says_why(places, message, flux, tmp_path):
    with pytest.raises(ValueError, match=message):
        split(flux, KINDS["nf4"], tmp_path, device_map=places)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_asked_for(flux):
    with pytest.raises(ValueError, match="Name a folder that has room for them"):
        split(flux, KINDS["nf4"], None)


def test_a_checkpoint_that_ends_loading_leaves_nothing(flux, tmp_path):
    image_options.load(flux, KINDS["nf4"]).save_pretrained(tmp_path / "quantized", safe_serialization=False)
    state = torch.load(tmp_path / "quantized" / "diffusion_pytorch_model.bin")
    del state["proj_out.weight.quant_state.bitsandbytes__nf4"]
    torch.save(state, tmp_path / "quantized" / "diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match="proj_out.weight does not contain"):
        split(tmp_path / "quantized", None, tmp_path / "off", use_safetensors=False)
    assert not list((tmp_path / "off").iterdir())
