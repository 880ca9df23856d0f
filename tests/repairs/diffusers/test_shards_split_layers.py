"""A quantized image model in shards is the one that was saved, wherever a shard ends."""

from __future__ import annotations

import pytest
import torch

import patches

from . import image_options
from .offloaded_flux import KINDS, assert_same_tensors, saved_tensors

ID = "diffusers-shards-split-layers"
INT8_ON_THE_CPU = "diffusers-device-map-refused"


@pytest.mark.parametrize("size", ["1KB", "10KB", "20KB", "40KB", "100KB"])
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_the_model_that_was_saved(how, size, flux, tmp_path):
    with patches.applied(ID, INT8_ON_THE_CPU):
        model = image_options.load(flux, how)
        model.save_pretrained(tmp_path / "shards", max_shard_size=size)
        assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
        again = image_options.load(tmp_path / "shards")
        again.save_pretrained(tmp_path / "whole")
    assert torch.equal(image_options.output(again), image_options.output(model))
    assert_same_tensors(*(saved_tensors(tmp_path / name) for name in ("whole", "shards")))


def test_a_state_that_no_shard_has_is_still_an_error(flux, tmp_path):
    image_options.load(flux, KINDS["nf4"]).save_pretrained(tmp_path, max_shard_size="20KB", safe_serialization=False)
    for file in tmp_path.glob("*.bin"):
        state = torch.load(file)
        if state.pop("proj_out.weight.quant_state.bitsandbytes__nf4", None) is not None:
            torch.save(state, file)
    with patches.applied(ID), pytest.raises(ValueError, match="proj_out.weight does not contain"):
        image_options.load(tmp_path, use_safetensors=False)
