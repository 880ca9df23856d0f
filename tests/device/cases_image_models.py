"""Image models of diffusers that do not fit: what lies where, what a use brings, and training that equals the whole model's."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.repairs.reproducers import image_models
from tests.device import watch
from tests.repairs.diffusers.offloaded_flux import KINDS, add_lora

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.one_in(3), pytest.mark.usefixtures("patched", "by_the_name_of_cuda")]
kinds = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)

BLOCKS = 4
HALF = {"": 0, "transformer_blocks": "cpu", "single_transformer_blocks.0": "disk", "proj_out": "disk"}


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """The folder of a FLUX of eight blocks, in bfloat16."""
    folder = tmp_path_factory.mktemp("flux")
    image_models.make_flux(num_layers=BLOCKS, num_single_layers=BLOCKS).bfloat16().save_pretrained(folder)
    return folder


def load(folder, how, places, **also):
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    options = {"quantization_config": BitsAndBytesConfig(**how), "torch_dtype": torch.bfloat16, **also}
    return FluxTransformer2DModel.from_pretrained(folder, device_map=places, **options)


def inputs(device):
    return {name: tensor.to(device) for name, tensor in image_models.flux_inputs(torch.bfloat16).items()}


def output(model, device):
    with torch.no_grad():
        return model(**inputs(device))[0]


def held_by(make):
    before = watch.held()
    model = make()
    return model, watch.held() - before


@kinds
@pytest.mark.parametrize("share, cpu", [(0.6, 10**9), (0.45, 20_000)], ids=["cpu", "cpu and disk"])
@pytest.mark.parametrize("auto", ["auto", "balanced", "sequential"])
def test_a_map_by_the_sizes_of_quantized_layers(auto, how, share, cpu, flux, device, tmp_path):
    whole, size = held_by(lambda: load(flux, how, {"": 0}))
    expected = output(whole, device)
    limit = int(share * size)
    before = watch.held()
    with watch.peak() as peak:
        model = load(flux, how, auto, max_memory={0: limit, "cpu": cpu}, offload_folder=tmp_path)
    assert set(model.hf_device_map.values()) == ({0, "cpu"} if cpu > size else {0, "cpu", "disk"})
    for _ in range(2):
        assert torch.equal(output(model, device), expected)
        assert 0.7 * limit <= watch.held() - before <= limit
    largest = max(p.numel() for p in image_models.make_flux().parameters())
    assert peak[0] <= limit + 6 * largest


@kinds
def test_what_fits_quantized_is_not_offloaded(how, flux, device):
    whole, size = held_by(lambda: load(flux, how, None))
    model = load(flux, how, "auto", max_memory={0: int(1.05 * size), "cpu": 10**9})
    assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
    assert torch.equal(output(model, device), output(whole, device))


@kinds
def test_a_map_for_two_devices(how, flux, device, other, tmp_path):
    whole, size = held_by(lambda: load(flux, how, {"": 0}))
    memory = {0: int(0.4 * size), 1: int(0.3 * size), "cpu": 10**9}
    model = load(flux, how, "auto", max_memory=memory)
    assert set(model.hf_device_map.values()) == {0, 1, "cpu"}
    for _ in range(2):
        assert torch.equal(output(model, device).to(device), output(whole, device))


@kinds
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
def test_what_a_use_brings(how, quantized, flux, device, tmp_path):
    whole, folder, also = load(flux, how, {"": 0}), flux, {}
    if quantized:
        folder = tmp_path / "quantized"
        whole.save_pretrained(folder)
    model = load(folder, how, HALF, offload_folder=tmp_path / "off", **also)
    assert torch.equal(output(model, device), output(whole, device))
    given = inputs(device)
    with watch.watch() as seen, torch.no_grad():
        model(**given)
    said = sum(sum(place.brings.values()) for place in patches.inspect(model).facts.places)
    assert seen.moved("host to device") == said
    away = [p for p in model.parameters() if p.is_meta]
    packed = sum(p.nbytes + (4 * p.shape[0] if type(p).__name__ == "Int8Params" else 0) for p in away)
    assert said == packed


@kinds
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_training_equals_that_of_the_whole_model(how, checkpointing, flux, device, tmp_path):
    results = []
    for model in (load(flux, how, {"": 0}), load(flux, how, HALF, offload_folder=tmp_path)):
        model.requires_grad_(False)
        add_lora(model)
        if checkpointing:
            model.enable_gradient_checkpointing()
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {parameter.device for parameter in trained} == {torch.device(device)}
        optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
        for _ in range(3):
            loss = (model(**inputs(device))[0].float() - 1).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        results.append((losses, [parameter.detach() for parameter in trained]))
    (expected, tensors), (losses, adapter) = results
    assert losses == expected and losses[-1] < losses[0]
    assert all(map(torch.equal, adapter, tensors))
