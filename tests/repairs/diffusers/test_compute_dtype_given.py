"""A compute dtype or a threshold that is given counts for an image model that is quantized already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.repairs.reproducers.log_records import record_logs

from . import image_options

diffusers = pytest.importorskip("diffusers")

ID = "diffusers-compute-dtype-given"
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def folder(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    image_options.load(flux, image_options.NF4).save_pretrained(path / "nf4")
    image_options.load(flux, {**image_options.INT8, "llm_int8_threshold": 4.0}).save_pretrained(path / "int8")
    return path


def computes(model) -> tuple[torch.dtype, torch.dtype]:
    return model.x_embedder.compute_dtype, model.config.quantization_config.bnb_4bit_compute_dtype


def threshold(model) -> tuple[float, float]:
    return model.x_embedder.state.threshold, model.config.quantization_config.llm_int8_threshold


@pytest.mark.parametrize("given", [torch.float16, torch.float32, "float16"], ids=str)
def test_a_compute_dtype(folder, given, tmp_path):
    with patches.applied(ID):
        model = image_options.load(folder / "nf4", {**FOUR, "bnb_4bit_compute_dtype": given})
    wanted = getattr(torch, given) if isinstance(given, str) else given
    assert computes(model) == (wanted, wanted)
    model.save_pretrained(tmp_path)
    assert computes(image_options.load(tmp_path)) == (wanted, wanted)


def test_one_that_was_not_given_is_that_of_the_file(folder):
    with patches.applied(ID):
        assert computes(image_options.load(folder / "nf4", FOUR)) == (torch.bfloat16, torch.bfloat16)
        assert computes(image_options.load(folder / "nf4")) == (torch.bfloat16, torch.bfloat16)
        assert threshold(image_options.load(folder / "int8", image_options.INT8)) == (4.0, 4.0)


@pytest.mark.parametrize("given", [0.0, 5.0, float("6")])
def test_a_threshold(folder, given):
    with patches.applied(ID):
        model = image_options.load(folder / "int8", {**image_options.INT8, "llm_int8_threshold": given})
    assert threshold(model) == (given, given)


def test_what_is_in_the_tensors_stays(folder):
    with patches.applied(ID):
        model = image_options.load(folder / "nf4", {**FOUR, "bnb_4bit_use_double_quant": True})
    assert not model.config.quantization_config.bnb_4bit_use_double_quant


def test_a_list_is_said_to_have_no_effect(folder):
    with patches.applied(ID), record_logs() as said:
        image_options.load(folder / "nf4", {**FOUR, "llm_int8_skip_modules": ["attn"]})
    assert ["has no effect" in record.getMessage() for record in said] == [True]


def test_a_configuration_is_saved_as_before():
    how = diffusers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=3.0)
    with patches.applied(ID):
        again = diffusers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=3.0)
        default = diffusers.BitsAndBytesConfig(load_in_8bit=True)
    assert again.to_dict() == how.to_dict() and again.to_diff_dict() == how.to_diff_dict()
    assert default.llm_int8_threshold == 6.0
