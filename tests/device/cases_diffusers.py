"""A pipeline with quantized components gives the image of the resident one, to the bit, in each way that diffusers has."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", minversion="0.36", reason="it has enable_group_offload of pipelines")

import torch  # noqa: E402
from diffusers import BitsAndBytesConfig, FluxPipeline, PipelineQuantizationConfig  # noqa: E402
from transformers import BitsAndBytesConfig as OfTransformers  # noqa: E402

from tests.device import watch  # noqa: E402
from tests.device.pipelines import (  # noqa: E402
    COMPONENTS, KINDS, draw, load, load_transformer, options, places, save_pipeline,
)  # fmt: skip

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("patched", "by_the_name_of_cuda")]

WAYS = {
    "to": lambda pipe: pipe.to("cuda"),
    "to and back": lambda pipe: pipe.to("cuda").to("cpu").to("cuda"),
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "model twice": lambda pipe: [pipe.enable_model_cpu_offload() for _ in range(2)],
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "sequential, then model": lambda pipe: [pipe.enable_sequential_cpu_offload(), pipe.enable_model_cpu_offload()],
    "model, then sequential": lambda pipe: [pipe.enable_model_cpu_offload(), pipe.enable_sequential_cpu_offload()],
}


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return save_pipeline(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def image(flux, patched):
    """The image of the resident pipeline, by the kind."""
    found = {}

    def of(kind):
        if kind not in found:
            found[kind] = draw(load(flux, kind).to("cuda"))
        return found[kind]

    return of


def on_device(pipe):
    return {name for name, found in places(pipe).items() if found - {"cpu", "meta"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_image_and_places(way, kind, flux, image, device):
    expected = image(kind)
    pipe = load(flux, kind)
    assert on_device(pipe) == set(COMPONENTS), "diffusers quantizes on the device"
    WAYS[way](pipe)
    for _ in range(3):
        assert torch.equal(draw(pipe), expected)
        # accelerate keeps quantization states of what it offloads layer by layer: see docs/state.md
        if way not in ("sequential", "model, then sequential") or kind == "int8":
            assert on_device(pipe) == (set(COMPONENTS) if way.startswith("to") else set())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_that_is_offloaded_by_models_holds_nothing_between_calls(kind, flux, image, device):
    expected, before = image(kind), watch.held()
    whole = load(flux, kind).to("cuda")
    size = watch.held() - before
    with watch.peak() as peak_of_whole:
        draw(whole)
    del whole
    pipe = load(flux, kind)
    pipe.enable_model_cpu_offload()
    assert watch.held() == before
    draw(pipe)
    settled = watch.held()
    with watch.peak() as peak, watch.watch() as seen:
        assert torch.equal(draw(pipe), expected)
    assert watch.held() == settled <= before + 64
    assert size <= seen.moved("host to device") <= 1.05 * size, "each component is brought once"
    assert peak[0] < size + peak_of_whole[0] - 0.4 * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["model", "sequential"])
def test_hooks_are_removed_after_a_call(way, kind, flux, image, device):
    pipe = load(flux, kind)
    WAYS[way](pipe)
    draw(pipe)
    pipe.remove_all_hooks()
    assert torch.equal(draw(pipe.to("cuda")), image(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["to", "model", "sequential"])
def test_two_pipelines_share_an_encoder(way, kind, flux, image, device):
    one, other = load(flux, kind), load(flux, kind)
    other = FluxPipeline(**{**other.components, "text_encoder_2": one.text_encoder_2})
    other.set_progress_bar_config(disable=True)
    WAYS[way](one)
    WAYS[way](other)
    for pipe in (one, other, one, other):
        assert torch.equal(draw(pipe), image(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["to", "model", "sequential"])
def test_saved_and_loaded(way, kind, flux, image, device, tmp_path):
    pipe = load(flux, kind)
    WAYS[way](pipe)
    draw(pipe)
    if way == "sequential":
        pipe.remove_all_hooks()
    pipe.save_pretrained(tmp_path)
    again = FluxPipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(draw(again.to("cuda")), image(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_configuration_for_two_loads(kind, flux, image, device):
    configs = {
        name: (BitsAndBytesConfig if name == "transformer" else OfTransformers)(**options(kind)) for name in COMPONENTS
    }
    before = {name: config.to_dict() for name, config in configs.items()}
    for _ in range(2):
        pipe = load(flux, kind, quantization_config=PipelineQuantizationConfig(quant_mapping=configs))
        assert torch.equal(draw(pipe.to("cuda")), image(kind))
    assert {name: config.to_dict() for name, config in configs.items()} == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device_map", ["balanced", "cuda", "cpu"])
def test_device_map_of_a_pipeline(device_map, kind, flux, image, device):
    pipe = load(flux, kind, device_map=device_map)
    if device_map != "cpu":
        assert torch.equal(draw(pipe), image(kind)) and torch.equal(draw(pipe), image(kind))
    pipe.reset_device_map()
    pipe.enable_model_cpu_offload()
    assert torch.equal(draw(pipe), image(kind))
    assert not on_device(pipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", ["cpu", "disk"])
def test_a_transformer_that_does_not_fit(rest, kind, flux, image, device, tmp_path):
    where = {"": 0, "transformer_blocks": rest, "single_transformer_blocks": "cpu"}
    pipe = load(flux, kind, transformer=load_transformer(flux, kind, where, tmp_path))
    for name in ("vae", "text_encoder", "text_encoder_2"):
        getattr(pipe, name).to("cuda")
    assert torch.equal(draw(pipe), image(kind))
    for place in ("cuda", "cpu"):
        with pytest.raises(ValueError, match=r"'transformer' \(FluxTransformer2DModel\)"):
            pipe.to(place)
    assert torch.equal(draw(pipe), image(kind)), "nothing was moved"
    if rest == "disk":
        with pytest.raises(
            ValueError, match=r"'transformer' \(FluxTransformer2DModel\) was loaded with .* on the disk"
        ):
            pipe.enable_model_cpu_offload()
    else:
        pipe.enable_model_cpu_offload()
        assert torch.equal(draw(pipe), image(kind)) and not on_device(pipe)
    assert torch.equal(draw(pipe), image(kind))
