"""An offloaded image model that is dequantized stays offloaded, and has the weights of the whole model."""

from __future__ import annotations

import pytest
import torch

from tests.repairs.patched_once import unpatched  # noqa: F401

from . import image_options
from .offloaded_flux import KINDS, split


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_the_weights_of_the_whole_model(how, flux, tmp_path):
    whole, model = image_options.load(flux, how), split(flux, how, tmp_path / "off")
    for each in (whole, model):
        each.dequantize()
    layer = model.transformer_blocks[0].attn.to_q
    assert type(layer) is torch.nn.Linear and layer.weight.is_meta
    stored = layer._hf_hook.weights_map["weight"]
    assert torch.equal(stored, whole.transformer_blocks[0].attn.to_q.weight)
    assert torch.equal(image_options.output(model), image_options.output(whole))
    model.save_pretrained(tmp_path / "plain")
    again = image_options.load(tmp_path / "plain")
    assert torch.equal(image_options.output(again), image_options.output(whole))
