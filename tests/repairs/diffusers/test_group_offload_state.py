"""What belongs to the packed weights of a layer goes where diffusers puts them; on a device that is apart, in tests/device."""

from __future__ import annotations

import pytest
import torch

import patches

from . import groups

ID = "diffusers-group-offload-state"


@pytest.fixture(autouse=True)
def only():
    with patches.applied(ID):
        yield


def separate_memory(layers: torch.nn.Module) -> list[int]:
    """How many bytes of packed weights the state of each layer has beside the weight."""
    held = [(layer.state.CB if layer.state.CB is not None else layer.weight.CB, layer.weight) for layer in layers]
    return [packed.nbytes for packed, weight in held if packed.data_ptr() != weight.data_ptr()]


@pytest.mark.parametrize("way", [groups.LEAF, groups.BLOCK], ids=["leaf", "block"])
def test_int8_weights_on_the_disk_are_not_in_memory(tmp_path, way):
    expected = groups.run(groups.model("int8"))
    layers = groups.offload(groups.model("int8"), folder=tmp_path, **way)
    assert not separate_memory(layers)
    for _ in range(2):
        assert torch.equal(groups.run(layers), expected)
        assert not separate_memory(layers)


def test_int8_weights_that_have_run_before(tmp_path):
    layers = groups.model("int8")
    expected = groups.run(layers)
    groups.offload(layers, folder=tmp_path)
    assert not separate_memory(layers)
    assert torch.equal(groups.run(layers), expected)
    assert not separate_memory(layers)
