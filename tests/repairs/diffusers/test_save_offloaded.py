"""An offloaded image model is saved as the whole model is, also into the folder that it reads from."""

from __future__ import annotations

import json

import pytest
import torch

from tests.repairs.patched_once import unpatched  # noqa: F401

from . import image_options
from .offloaded_flux import KINDS, assert_same_tensors, saved_tensors, split

kinds = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "40KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran"])
def test_the_tensors_of_the_whole_model(how, shards, ran, flux, tmp_path):
    whole, model = image_options.load(flux, how), split(flux, how, tmp_path / "off")
    if ran:
        image_options.output(model)
    whole.save_pretrained(tmp_path / "whole", **shards)
    model.save_pretrained(tmp_path / "split", **shards)
    assert_same_tensors(*(saved_tensors(tmp_path / name) for name in ("split", "whole")))
    one, two = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("split", "whole"))
    assert one == two
    assert all(p.is_meta for p in model.transformer_blocks.parameters())


@kinds
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "40KB"}], ids=["one file", "shards"])
def test_the_folder_that_it_reads_from(how, shards, flux, tmp_path):
    image_options.load(flux, how).save_pretrained(tmp_path / "quantized", **shards)
    before = saved_tensors(tmp_path / "quantized")
    model = split(tmp_path / "quantized", None, tmp_path / "off")
    expected = image_options.output(model)
    model.save_pretrained(tmp_path / "quantized", **shards)
    assert_same_tensors(saved_tensors(tmp_path / "quantized"), before)
    assert torch.equal(image_options.output(model), expected)
    assert torch.equal(image_options.output(image_options.load(tmp_path / "quantized")), expected)


def test_a_failure_leaves_the_checkpoint(flux, tmp_path, monkeypatch):
    image_options.load(flux, KINDS["nf4"]).save_pretrained(tmp_path / "quantized")
    before = saved_tensors(tmp_path / "quantized")
    model = split(tmp_path / "quantized", None, tmp_path / "off")
    expected = image_options.output(model)
    monkeypatch.setattr("safetensors.torch.save_file", _no_room)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "quantized")
    assert_same_tensors(saved_tensors(tmp_path / "quantized"), before)
    assert torch.equal(image_options.output(model), expected)


def _no_room(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_model_that_is_not_offloaded_is_saved_as_before(flux, tmp_path):
    model = image_options.load(flux, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert_same_tensors(saved_tensors(tmp_path), saved_tensors(flux))
