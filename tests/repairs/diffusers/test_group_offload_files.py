"""Each group on the disk has a file with its own tensors, whatever else is in the folder."""

from __future__ import annotations

import pytest
import torch

import patches

from . import groups, image_options

ID = "diffusers-group-offload-files"


@pytest.fixture(autouse=True)
def only():
    with patches.applied(ID):
        yield


@pytest.mark.parametrize("kind", groups.KINDS)
def test_two_models_in_one_folder(tmp_path, kind):
    expected = [groups.run(groups.model(kind, seed=seed)) for seed in range(2)]
    models = [groups.offload(groups.model(kind, seed=seed), folder=tmp_path) for seed in range(2)]
    for _ in range(2):
        assert all(torch.equal(groups.run(each), one) for each, one in zip(models, expected, strict=True))


def test_another_quantization_of_the_model_of_an_earlier_run(tmp_path):
    groups.offload(groups.model("int8"), folder=tmp_path)
    expected = groups.run(groups.model("nf4"))
    assert torch.equal(groups.run(groups.offload(groups.model("nf4"), folder=tmp_path)), expected)


def test_other_values_of_one_shape_and_files_that_are_cut_short(tmp_path):
    groups.offload(groups.model("nf4"), folder=tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    expected = groups.run(groups.model("nf4", seed=1))
    assert torch.equal(groups.run(groups.offload(groups.model("nf4", seed=1), folder=tmp_path)), expected)


def test_files_that_hold_the_tensors_are_used_again(tmp_path):
    groups.offload(groups.model("nf4"), folder=tmp_path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    groups.offload(groups.model("nf4", seed=1), folder=tmp_path)
    both = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(both) == len(before) + 3 and both.items() >= before.items()
    for seed in range(2):
        groups.offload(groups.model("nf4", seed=seed), folder=tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == both


@pytest.mark.parametrize("way", [groups.LEAF, groups.BLOCK], ids=["leaf", "block"])
def test_lora_is_loaded_into_a_model_on_the_disk_and_unloaded(flux, tmp_path, way):
    peft = pytest.importorskip("peft")

    def adapt(model):
        torch.manual_seed(1)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_k"], init_lora_weights=False))
        return model

    whole = image_options.load(flux, image_options.NF4)
    base, expected = image_options.output(whole), image_options.output(adapt(whole))
    model = image_options.load(flux, image_options.NF4)
    other = image_options.load(flux, image_options.NF4)
    for each in (other, model):  # two models in one folder, so that a file has the name that another wanted
        each.enable_group_offload(torch.device("cpu"), offload_to_disk_path=str(tmp_path), **way)
    assert torch.equal(image_options.output(model), base)
    from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading as reapply

    reapply(adapt(model))  # as load_lora_weights does
    assert torch.equal(image_options.output(model), expected)
    model.unload_lora()
    assert torch.equal(image_options.output(model), base)
    assert torch.equal(image_options.output(other), base)
