"""A compute dtype in which 4-bit layers of an image model cannot compute raises an error."""

from __future__ import annotations

import pytest
import torch

import patches

from . import image_options

diffusers = pytest.importorskip("diffusers")

ID = "diffusers-compute-dtype-not-floating"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.complex64, "int8", "fp16"], ids=str
)
def test_others_raise(dtype):
    with patches.applied(ID), pytest.raises(ValueError, match="4-bit layers cannot compute in it"):
        diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, "bfloat16", None], ids=str
)
def test_floating_ones_are_accepted(dtype):
    expected = diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    with patches.applied(ID):
        assert (
            diffusers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype).to_dict()
            == expected.to_dict()
        )


def test_int8_models_are_loaded_as_before(flux):
    with patches.applied(ID):
        model = image_options.load(flux, {**image_options.INT8, "bnb_4bit_compute_dtype": torch.int8})
    assert len(image_options.packed(model)) > 20
