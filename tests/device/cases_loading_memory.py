"""What loading a quantized model takes of the device beside what stays there: one weight at a time."""

from __future__ import annotations

import pytest

from tests.device import watch
from tests.device.models import QUANTIZED, half, load, quantized_layers, save_llama

pytestmark = pytest.mark.usefixtures("patched", "by_the_name_of_cuda")

LAYERS = 16
EACH_DAY = {("nf4", "cpu"), ("int8", "cpu")}


def product():
    for kind in QUANTIZED:
        for place in ("cpu", "disk"):
            marks = [] if (kind, place) in EACH_DAY else [pytest.mark.release("another kind in that place")]
            yield pytest.param(kind, place, marks=marks)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("deep"), layers=LAYERS)


@pytest.mark.parametrize("kind, place", product())
def test_one_weight_at_a_time(kind, place, deep, device, tmp_path):
    """A quantized checkpoint was read ahead by threads: all that the CPU was to keep was on the device at once."""
    load(deep, kind, {"": device}).save_pretrained(tmp_path / "quantized")
    places = {**half(device, place, LAYERS), **{f"model.layers.{i}": place for i in range(2, LAYERS)}}
    for folder, given in ((deep, kind), (tmp_path / "quantized", "plain")):
        before = watch.held()
        with watch.peak() as peak:
            model = load(folder, given, places, offload_folder=tmp_path / "off")
        stays = watch.held() - before
        largest = max(layer.in_features * layer.out_features for layer in quantized_layers(model))
        listed = 1024 * len(list(quantized_layers(model)))  # accelerate asks for a state dict, to check the map
        assert peak[0] <= stays + 7 * largest + listed, "what is read, and for INT8 its copy in float16 and the codes"
        del model
