"""The state dict of a model on the disk holds its weights, and the model stays as it is."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.repairs.reproducers import image_models

from . import groups, image_options

ID = "diffusers-group-offload-save"


@pytest.fixture(autouse=True)
def only():
    with patches.applied(ID):
        yield


def differ(state, expected):
    assert state.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(state[name], tensor)]


@pytest.mark.parametrize("way", [groups.LEAF, groups.BLOCK], ids=["leaf", "block"])
@pytest.mark.parametrize("kind", groups.KINDS)
def test_state_dict_before_and_after_a_forward(tmp_path, kind, way):
    expected = {name: tensor.clone() for name, tensor in groups.model(kind).state_dict().items()}
    layers = groups.offload(groups.model(kind), folder=tmp_path, **way)
    assert not differ(layers.state_dict(), expected)
    output = groups.run(layers)
    assert not differ(layers.state_dict(), expected)
    assert torch.equal(groups.run(layers), output)


def test_a_part_of_the_model_with_a_prefix(tmp_path):
    expected = groups.model("nf4")[1].state_dict(prefix="one.")
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    layers = groups.offload(groups.model("nf4"), folder=tmp_path)
    assert not differ(layers[1].state_dict(prefix="one."), expected)


@pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)
def test_saved_and_loaded(flux, tmp_path, how):
    model = image_options.load(flux, how)
    expected = image_options.output(model)
    model = image_options.load(flux, how)
    model.enable_group_offload(torch.device("cpu"), offload_to_disk_path=str(tmp_path / "groups"), **groups.LEAF)
    model.save_pretrained(tmp_path / "saved")
    with image_models.as_with_gpu():
        again = type(model).from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16, device_map="cpu")
    assert torch.equal(image_options.output(again), expected)


def test_what_was_written_into_the_model_since_is_saved(tmp_path):
    layers = groups.offload(groups.model("nf4"), folder=tmp_path)
    new = torch.full_like(layers[0].weight.data, 7)
    layers[0].weight.data = new
    state = layers.state_dict()
    assert torch.equal(state["0.weight"], new)
    assert torch.equal(state["1.weight"], groups.model("nf4").state_dict()["1.weight"])
