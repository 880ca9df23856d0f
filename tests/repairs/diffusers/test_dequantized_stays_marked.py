"""A dequantized image model is a plain one: it is saved, loaded and cast as such."""

from __future__ import annotations

import json

import pytest
import torch

import patches

from . import image_options

diffusers = pytest.importorskip("diffusers")

ID = "diffusers-dequantized-stays-marked"
BOTH = pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)


def dequantized(flux, how):
    with patches.applied(ID, "diffusers-dequantize-without-gpu"):
        return image_options.load(flux, how).dequantize()


@BOTH
def test_it_is_saved_and_loaded_as_a_plain_model(flux, tmp_path, how):
    plain = dequantized(flux, how)
    plain.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert torch.equal(image_options.output(again), image_options.output(plain))


@BOTH
def test_it_is_quantized_again(flux, tmp_path, how):
    dequantized(flux, how).save_pretrained(tmp_path)
    again = image_options.load(tmp_path, image_options.NF4)
    assert len(image_options.packed(again)) > 20


@BOTH
def test_it_is_cast(flux, how):
    plain = dequantized(flux, how)
    for cast, dtype in (
        (plain.half, torch.float16),
        (plain.float, torch.float32),
        (lambda: plain.to(torch.bfloat16), torch.bfloat16),
    ):
        cast()
        assert {p.dtype for p in plain.parameters()} == {dtype}


@BOTH
def test_a_pipeline_casts_it(flux, how):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    none = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = diffusers.FluxPipeline(scheduler, transformer=dequantized(flux, how), **none)
    pipe.to(torch.float16)
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.float16}


@BOTH
def test_the_rest_of_its_configuration_stays(flux, how):
    before = image_options.load(flux, how)
    before.config.in_channels = 128  # as a Control LoRA does
    with patches.applied(ID, "diffusers-dequantize-without-gpu"):
        config = before.dequantize().config
    assert config.in_channels == 128 and config["num_layers"] == 1
    assert "quantization_config" not in config and not hasattr(config, "quantization_config")


def test_other_methods_keep_what_they_have():
    """What another quantizer leaves in the configuration is not ours to remove."""
    from diffusers.quantizers.base import DiffusersQuantizer

    model = torch.nn.Module()
    model.quantization_method = "other"
    quantizer = type("Other", (), {"_dequantize": lambda self, model: model})()
    quantizer.quantization_config, model.hf_quantizer = type("Config", (), {"quant_method": "other"}), quantizer
    with patches.applied(ID):
        DiffusersQuantizer.dequantize(quantizer, model)
    assert model.quantization_method == "other" and not hasattr(model, "hf_quantizer")
