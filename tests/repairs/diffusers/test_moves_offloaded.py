"""A pipeline with an offloaded quantized component says which it is, and is as before."""

from __future__ import annotations

import pytest
import torch

from tests.repairs.patched_once import unpatched  # noqa: F401  what is offloaded needs other patches to run

from . import image_options

diffusers = pytest.importorskip("diffusers")

NONE = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
EACH = pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)


def pipeline(transformer):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **NONE)


@EACH
def test_moved_while_it_is_offloaded_layer_by_layer(flux, how):
    transformer = image_options.load(flux, how)
    expected = image_options.output(transformer)
    pipe = pipeline(transformer)
    pipe.enable_sequential_cpu_offload(device="cpu")
    for place in ("cpu", torch.device("meta")):
        with pytest.raises(ValueError, match=r"'transformer' \(FluxTransformer2DModel\).*pipe.remove_all_hooks\(\)"):
            pipe.to(place)
    pipe.remove_all_hooks()
    assert torch.equal(image_options.output(pipe.to("cpu").transformer), expected)


@EACH
@pytest.mark.parametrize(
    "call", ["remove_all_hooks", "enable_model_cpu_offload", "enable_sequential_cpu_offload", "to"]
)
def test_layers_on_the_disk_keep_their_hooks(flux, tmp_path, how, call):
    where = {"device_map": {"": "cpu", "transformer_blocks": "disk"}, "offload_folder": str(tmp_path)}
    expected = image_options.output(image_options.load(flux, how))
    pipe = pipeline(image_options.load(flux, how, **where))
    options = {} if call == "remove_all_hooks" else {"device": "cpu"}
    with pytest.raises(
        ValueError, match=r"'transformer' \(FluxTransformer2DModel\).*without (a|'disk' in its) device_map"
    ):
        getattr(pipe, call)(**options)
    assert torch.equal(image_options.output(pipe.transformer), expected)
