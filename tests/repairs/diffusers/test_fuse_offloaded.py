"""An adapter that is fused into offloaded blocks, and taken out again, is the one that is fused into the whole model."""

from __future__ import annotations

import pytest
import torch

from tests.repairs.patched_once import unpatched  # noqa: F401

from . import image_options
from .offloaded_flux import KINDS, add_lora, split

pytest.importorskip("peft")


@pytest.mark.parametrize("how", [*KINDS.values(), None], ids=[*KINDS, "plain"])
def test_fused_and_unfused_as_the_whole_model(how, flux, tmp_path):
    if how is None:
        from accelerate import cpu_offload

        models = [image_options.load(flux) for _ in range(2)]
        cpu_offload(models[1], execution_device=torch.device("cpu"))
    else:
        models = [image_options.load(flux, how), split(flux, how, tmp_path)]
    outputs = []
    for model in models:
        add_lora(model)
        seen = [image_options.output(model)]
        model.fuse_lora(lora_scale=0.5)
        seen.append(image_options.output(model))
        model.unfuse_lora()
        seen.append(image_options.output(model))
        model.unload_lora()
        seen.append(image_options.output(model))
        outputs.append(seen)
    assert all(map(torch.equal, *outputs))
    beside, fused, *_ = outputs[0]
    assert not torch.equal(beside, fused)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_what_is_fused_is_saved(how, flux, tmp_path):
    saved = []
    for at, model in enumerate((image_options.load(flux, how), split(flux, how, tmp_path / "off"))):
        add_lora(model).fuse_lora()
        model.unload_lora()
        model.save_pretrained(tmp_path / str(at))
        saved.append(image_options.output(image_options.load(tmp_path / str(at))))
    assert torch.equal(*saved)
