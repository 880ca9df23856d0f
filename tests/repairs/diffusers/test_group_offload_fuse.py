"""LoRA that is fused into a model on the disk is that of the model that is whole."""

from __future__ import annotations

import pytest
import torch

import patches

from . import groups, image_options

peft = pytest.importorskip("peft")

ID = "diffusers-group-offload-fuse"


def adapted(flux, how):
    model = image_options.load(flux, how)
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    return model


@pytest.mark.parametrize("way", [groups.LEAF, groups.BLOCK], ids=["leaf", "block"])
@pytest.mark.parametrize("run_before", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize("how", [*image_options.BOTH.values(), None], ids=[*image_options.BOTH, "plain"])
def test_fused_and_unfused(flux, tmp_path, how, run_before, way):
    def give(model):
        model.fuse_lora()
        fused = image_options.output(model)
        model.unfuse_lora()
        return fused, image_options.output(model)

    expected = give(adapted(flux, how))
    with patches.applied(ID):
        model = adapted(flux, how)
        model.enable_group_offload(torch.device("cpu"), offload_to_disk_path=str(tmp_path), **way)
        if run_before:
            image_options.output(model)
        found = give(model)
    assert all(map(torch.equal, found, expected)) and not torch.equal(*found)
