"""Layers that are moved there and back, copied, saved and loaded over devices are what they were, all of them there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

from tests.device.layers import KINDS, inputs, places, rounds_alike, same, stack, step

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("patched")]


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=["cold", "evaluated", "trained"])
def made(kind, device, request) -> torch.nn.Sequential:
    """A stack that was used or not: INT8 layers keep their codes in another place after a forward."""
    model = stack(kind, device)
    if request.param == "evaluated":
        with torch.no_grad():
            model.eval()(inputs(device))
    elif request.param == "trained":
        step(model, inputs(device))
    return model.train()


MOVES: dict[str, Callable[[torch.nn.Module, str], object]] = {
    "model.to": lambda model, place: model.to(place),
    "layer.to": lambda model, place: [layer.to(place) for layer in model],
    "dtype too": lambda model, place: model.to(place, torch.float32),
    "without waiting": lambda model, place: model.to(place, non_blocking=True),
    "_apply": lambda model, place: model._apply(lambda tensor: tensor.to(place)),
}


def assert_is(model: torch.nn.Module, kind: str, place: str) -> None:
    """It computes and trains as if it had been made on the device, and no tensor of it is elsewhere."""
    torch.accelerator.synchronize()
    if place == "cpu" and not rounds_alike(kind, "cuda"):
        return
    x = inputs(place)
    expected = step(stack(kind, place), x)
    assert places(model) == {place}
    assert same(step(model, x), expected) and same(step(model, x), expected)
    assert places(model) == {place}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_there_and_back(move, made, kind, device, other):
    for place in ("cpu", device, other, "cpu", other):
        move(made, place)
        assert_is(made, kind, place)


@pytest.mark.parametrize("kind", ["int8", "int8-outliers"])
def test_a_layer_not_used_yet_whose_weight_is_brought_back_by_its_data(kind, device):
    """As diffusers' group offloading does. Without the patches its codes and scales never leave the device."""
    model = stack(kind, device).to("cpu")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    assert same(step(model, inputs(device)), step(stack(kind, device), inputs(device)))
    assert places(model) == {device}


def test_cpu_and_its_counterpart(made, kind, device):
    made.cpu()
    assert_is(made, kind, "cpu")
    getattr(made, device.split(":")[0])()  # .cuda()
    assert_is(made, kind, device)


def test_a_weight_alone(made, kind, device, other):
    x = inputs(device)
    expected = step(stack(kind, device), x)
    weights = [layer.weight for layer in made]
    for place in ("cpu", other, device):
        weights = [weight.to(place) for weight in weights]
        assert all(str(weight.device) == place for weight in weights)
    fresh = stack(kind, device)
    for layer, weight in zip(fresh, weights, strict=True):
        layer.weight = weight
    assert same(step(fresh, x), expected)
    assert places(fresh) == {device}


def torch_saved(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False, **options)


COPIES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": torch_saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies(copied, made, kind, device, other):
    twin = copied(made)
    assert_is(twin, kind, device)
    twin.to(other)
    assert_is(twin, kind, other)
    assert_is(made, kind, device)


def test_loaded_to_another_device(made, kind, other):
    for place in ("cpu", other):
        assert_is(torch_saved(made, map_location=place), kind, place)


def state_dict(model: torch.nn.Module, place: str | None = None) -> dict[str, torch.Tensor]:
    """As it is saved in one process and loaded in another, onto ``place``."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=place)


def zeroed(kind: str, place: str) -> torch.nn.Sequential:
    """The same layers with other codes."""
    torch.manual_seed(5)
    model = stack(kind, place)
    for layer in model:
        layer.weight.data.zero_()
        layer.bias.data.zero_()
    return model


@pytest.mark.parametrize("made", ["evaluated", "trained"], indirect=True)
@pytest.mark.parametrize("used", [False, True], ids=["cold", "used"])
@pytest.mark.parametrize("to", ["device", "other", "cpu"])
@pytest.mark.parametrize("place", ["device", "other", "cpu"])
def test_a_state_dict_of_one_device_is_loaded_on_another(place, to, used, made, kind, device, other):
    named = {"device": device, "other": other, "cpu": "cpu"}
    model = zeroed(kind, named[to])
    if used:
        step(model, inputs(named[to]))
    model.load_state_dict(state_dict(made, named[place]))
    assert_is(model, kind, named[to])


@pytest.mark.parametrize("place", ["device", "other", "cpu"])
def test_a_state_dict_is_assigned(place, made, kind, device, other):
    place = {"device": device, "other": other, "cpu": "cpu"}[place]
    model = zeroed(kind, device)
    model.load_state_dict(state_dict(made, place), assign=True)
    assert places(model) == {place}
    assert_is(model, kind, place)
    assert_is(model.to(device), kind, device)


def test_from_meta(made, kind, device, other):
    saved = state_dict(made, "cpu")
    for place in (other, device):
        model = stack(kind, device).to("meta").to_empty(device=place)
        model.load_state_dict(saved)
        assert_is(model, kind, place)
