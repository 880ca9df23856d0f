"""``llm_int8_skip_modules`` skips the layers that it names in image models too, and belongs to the user."""

from __future__ import annotations

import logging

import pytest
import torch

import patches
from patches.config import skip_list
from patches.repairs.reproducers import image_models

from . import image_options

diffusers = pytest.importorskip("diffusers")

ID = "diffusers-skip-list-ignored"
BOTH = pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A FLUX with two double and eleven single blocks."""
    folder = tmp_path_factory.mktemp("deep")
    image_models.save_flux(str(folder), num_layers=2, num_single_layers=11)
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A Wan transformer, whose class keeps norms and the time embedder in float32."""
    folder = tmp_path_factory.mktemp("wan")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64}
    diffusers.WanTransformer3DModel(in_channels=4, out_channels=4, num_layers=1, **sizes).save_pretrained(folder)
    return folder


def quantized(model):
    return {path for path, module in model.named_modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")}


@BOTH
@pytest.mark.parametrize(
    "names",
    [
        ["transformer_blocks"],
        ["transformer_blocks.0"],
        ["single_transformer_blocks.1"],
        ["attn.to_q", "norm.linear"],
        ["proj_out"],
        ["single_transformer_blocks.10.attn.to_q"],
        ["transformer_blocks.1.attn", "x_embedder", "to_out.0"],
    ],
    ids=" ".join,
)
def test_it_skips_what_it_names_and_the_saved_model_loads_without_the_plugin(deep, tmp_path, names, how):
    with patches.applied(ID):
        everywhere = quantized(image_options.load(deep, how))
        model = image_options.load(deep, {**how, "llm_int8_skip_modules": list(names)})
    named = {path for path in everywhere if any(skip_list.path_contains(path, name) for name in names)}
    assert everywhere - quantized(model) == named != set()
    model.save_pretrained(tmp_path)
    again = image_options.load(tmp_path)
    assert quantized(again) == quantized(model)
    assert torch.equal(image_options.output(again), image_options.output(model))


@BOTH
def test_a_piece_of_a_path_that_is_no_name_skips_what_it_did(deep, how):
    how = {**how, "llm_int8_skip_modules": ["blocks.1"]}
    expected = quantized(image_options.load(deep, how))
    with patches.applied(ID):
        assert quantized(image_options.load(deep, how)) == expected
    assert not any(path.startswith("transformer_blocks.1.") for path in expected)


@BOTH
def test_the_list_of_the_user_is_not_changed(deep, wan, how):
    names = ["proj_out"]
    config = diffusers.BitsAndBytesConfig(**how, llm_int8_skip_modules=names)
    options = {"quantization_config": config, "torch_dtype": torch.bfloat16, "device_map": "cpu"}
    with patches.applied(ID), image_models.as_with_gpu():
        first = diffusers.WanTransformer3DModel.from_pretrained(wan, **options)
        second = diffusers.FluxTransformer2DModel.from_pretrained(deep, **options)
    assert names == ["proj_out"] and config.llm_int8_skip_modules is names
    assert "transformer_blocks.0.norm1.linear" in quantized(second)
    assert "norm1" in first.config.quantization_config.llm_int8_skip_modules  # what the class keeps in float32 is saved
    assert not any("time_embedder" in path for path in quantized(first))


def test_without_a_list_nothing_changes(deep):
    expected = quantized(image_options.load(deep, image_options.NF4))
    with patches.applied(ID):
        model = image_options.load(deep, image_options.NF4)
    assert quantized(model) == expected and model.config.quantization_config.llm_int8_skip_modules is None


def test_unknown_and_empty_names(deep, caplog):
    with patches.applied(ID), caplog.at_level(logging.WARNING):
        image_options.load(deep, {**image_options.NF4, "llm_int8_skip_modules": ["x_embeder"]})
    assert "no module of that name" in caplog.text and "x_embedder" in caplog.text
    with patches.applied(ID), pytest.raises(ValueError, match="names no module"):
        image_options.load(deep, {**image_options.NF4, "llm_int8_skip_modules": [""]})
