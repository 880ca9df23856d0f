"""A compute dtype that 4-bit layers cannot compute in is an error that says so; any other is taken as before."""

from __future__ import annotations

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

ID = "transformers-compute-dtype-not-floating"
CONFIG = transformers.BitsAndBytesConfig


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.complex64, torch.float8_e4m3fn, "int8", "fp16", "Tensor"]
)
def test_refused(dtype):
    with patches.applied(ID), pytest.raises(ValueError, match="4-bit layers cannot compute in it"):
        CONFIG(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [None, torch.float16, torch.bfloat16, torch.float32, "float16", "bfloat16", "float64"]
)
def test_taken_as_before(dtype):
    expected = CONFIG(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    with patches.applied(ID):
        again = CONFIG(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    assert again.to_dict() == expected.to_dict()


def test_what_has_no_4_bits_is_not_looked_at():
    with patches.applied(ID):
        assert CONFIG(load_in_8bit=True, bnb_4bit_compute_dtype="int8").bnb_4bit_compute_dtype is torch.int8


def test_no_dtype_at_all_is_the_librarys_error():
    with patches.applied(ID), pytest.raises(ValueError, match="must be a string or a torch.dtype"):
        CONFIG(load_in_4bit=True, bnb_4bit_compute_dtype=16)
