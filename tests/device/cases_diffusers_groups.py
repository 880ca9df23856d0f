"""Group offloading of a pipeline with quantized components: the image of the resident one, and nothing that stays on the device."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", minversion="0.36", reason="it has enable_group_offload of pipelines")

import torch  # noqa: E402
from diffusers import FluxPipeline  # noqa: E402
from peft import LoraConfig, get_peft_model_state_dict  # noqa: E402

from tests.device import watch  # noqa: E402
from tests.device.cases_diffusers import flux, image, on_device  # noqa: E402, F401
from tests.device.pipelines import COMPONENTS, KINDS, draw, load  # noqa: E402

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("patched", "by_the_name_of_cuda")]

LEAF = {"offload_type": "leaf_level"}
BLOCK = {"offload_type": "block_level", "num_blocks_per_group": 1}
WAYS = {
    "leaf": LEAF,
    "block": BLOCK,
    "two blocks": {**BLOCK, "num_blocks_per_group": 2},
    "block, not blocking": {**BLOCK, "non_blocking": True},
    "leaf, stream": {**LEAF, "use_stream": True},
    "block, stream": {**BLOCK, "use_stream": True},
    "leaf, stream, pinned late": {**LEAF, "use_stream": True, "low_cpu_mem_usage": True},
    "leaf, disk": LEAF,
    "block, disk": BLOCK,
    "leaf, disk, stream": {**LEAF, "use_stream": True},
    "block, disk, stream": {**BLOCK, "use_stream": True},
}
FEW = ["leaf", "block, stream", "leaf, disk"]


def offload(pipe, way, folder):
    path = str(folder / "groups") if "disk" in way else None
    pipe.enable_group_offload(torch.device("cuda"), **WAYS[way], offload_to_disk_path=path)
    return pipe


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_image_and_bytes(place, way, kind, flux, image, device, tmp_path):  # noqa: F811
    expected, before = image(kind), watch.held()
    whole = load(flux, kind).to("cuda")
    size = watch.held() - before
    with watch.peak() as peak_of_whole:
        draw(whole)
    del whole
    pipe = offload(load(flux, kind).to(place), way, tmp_path)
    assert watch.held() == before, "nothing stays on the device"
    for _ in range(3):
        with watch.peak() as peak, watch.watch() as seen:
            assert torch.equal(draw(pipe), expected)
        assert watch.held() <= before + 64 and not on_device(pipe)
        assert peak[0] < peak_of_whole[0] + 0.4 * size
        # The transformer runs twice.
        assert size < seen.moved("host to device") < 2 * size
    if "leaf, stream" in way or "disk" in way:
        assert seen.moved("device to host") < 2000, "what is on the host already is not copied back"


@pytest.fixture(scope="module")
def lora(flux, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("lora")
    transformer = load(flux, "plain").transformer
    torch.manual_seed(1)
    transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "proj_out"], init_lora_weights=False))
    FluxPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(transformer))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", FEW)
def test_lora_is_loaded_fused_and_unloaded(way, kind, flux, image, lora, device, tmp_path):  # noqa: F811
    def give(pipe):
        pipe.load_lora_weights(lora)
        found = [draw(pipe)]
        pipe.fuse_lora()
        found.append(draw(pipe))
        pipe.unfuse_lora()
        found.append(draw(pipe))
        pipe.unload_lora_weights()
        return [*found, draw(pipe)]

    expected, before = give(load(flux, kind).to("cuda")), watch.held()
    assert not torch.equal(expected[0], image(kind))
    pipe = offload(load(flux, kind), way, tmp_path)
    assert torch.equal(draw(pipe), image(kind))
    assert all(map(torch.equal, give(pipe), expected))
    assert watch.held() <= before + 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", FEW)
def test_saved_and_loaded(way, kind, flux, image, device, tmp_path):  # noqa: F811
    pipe = offload(load(flux, kind), way, tmp_path)
    draw(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    again = FluxPipeline.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(draw(again.to("cuda")), image(kind))
    assert torch.equal(draw(pipe), image(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["leaf", "block", "leaf, disk", "block, disk"])
def test_two_pipelines_share_an_encoder_and_a_folder(way, kind, flux, image, device, tmp_path):  # noqa: F811
    one, other = load(flux, kind), load(flux, kind)
    other = FluxPipeline(**{**other.components, "text_encoder_2": one.text_encoder_2})
    other.set_progress_bar_config(disable=True)
    for pipe in (one, other):
        offload(pipe, way, tmp_path)
    for pipe in (one, other, one, other):
        assert torch.equal(draw(pipe), image(kind))
        assert not on_device(pipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_one_component_that_is_offloaded_by_itself(component, kind, flux, image, device):  # noqa: F811
    from diffusers.hooks import apply_group_offloading

    pipe = load(flux, kind).to("cuda")
    apply_group_offloading(getattr(pipe, component), torch.device("cuda"), **LEAF, use_stream=True)
    for _ in range(2):
        assert torch.equal(draw(pipe), image(kind))
        assert on_device(pipe) == set(COMPONENTS) - {component}
