"""A float32 compute dtype that nobody chose for an image model is said once; one that was chosen is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patches
from patches.config import float32_compute
from patches.repairs.reproducers.log_records import record_logs

from . import image_options

pytest.importorskip("diffusers")

ID, GIVEN = "diffusers-float32-compute-default", "diffusers-compute-dtype-given"
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def folder(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    image_options.load(flux, FOUR).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def first(monkeypatch):
    monkeypatch.setattr(float32_compute, "_told", set())


def said(folder: Path, how, *ids: str, times: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    with patches.applied(ID, *ids), record_logs() as records:
        for _ in range(times):
            image_options.load(folder, how, dtype)
    return [text for text in (record.getMessage() for record in records) if "compute in float32" in text]


def test_said_once_with_the_remedy(flux):
    (text,) = said(flux, FOUR, times=2)
    assert "FluxTransformer2DModel" in text and "bnb_4bit_compute_dtype=torch.bfloat16" in text


def test_said_of_a_checkpoint(folder):
    (text,) = said(folder, None)
    assert "its checkpoint says so" in text


@pytest.mark.parametrize("dtype", ["float32", torch.float32, torch.bfloat16], ids=str)
def test_one_that_was_chosen(flux, folder, dtype):
    assert not said(flux, {**FOUR, "bnb_4bit_compute_dtype": dtype})
    assert not said(folder, {**FOUR, "bnb_4bit_compute_dtype": dtype}, GIVEN)


def test_a_model_in_float32_and_int8(flux):
    assert not said(flux, FOUR, dtype=torch.float32)
    assert not said(flux, image_options.INT8)


def test_numbers_are_the_same(flux):
    expected = image_options.output(image_options.load(flux, FOUR))
    with patches.applied(ID), record_logs():
        assert torch.equal(image_options.output(image_options.load(flux, FOUR)), expected)
