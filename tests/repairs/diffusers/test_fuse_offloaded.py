"""An adapter that is fused into offloaded blocks, and taken out again, is the one that is fused into the whole model."""

from __future__ import annotations

import pytest
import torch

from tests.repairs.patched_once import unpatched  # noqa: F401

from . import image_options
from .offloaded_flux import KINDS, add_lora, split

pytest.importorskip("peft")


@pytest.mark.parametrize("how", [*KINDS.values(), None], ids=[*KINDS, "plain"])
def test_fused_and_unfused_as_the_whole_model(how, flux, tmp_path):
    if how is None:
        from accelerate import cpu_offload

        models = [image_options.load(flux) for _ in range(2)]
        cpu_offload(models[1], execution_device=torch.device("cpu"))
    else:
        models = [image_options.load(flux, how), split(flux, how, tmp_path)]
    outputs = []
    for model in models:
        add_lora(model)
        seen = [image_options.output(model)]
        model.fuse_lora(lora_scale=0.5)
        seen.append(image_options.output(model))
        model.unfuse_lora()
        seen.append(image_options.output(model))
        model.unload_lora()
        seen.append(image_options.output(model))
        outputs.append(seen)
    assert all(map(torch.equal, *outputs))
    beside, fused, *_ = outputs[0]
    assert not torch.equal(beside, fused)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_what_is_fused_is_saved(how, flux, tmp_path):
    saved = []
    for at, model in enumerate((image_options.load(flux, how), split(flux, how, tmp_path / "off"))):
        add_lora(model).fuse_lora()
        model.unload_lora()
        model.save_pretrained(tmp_path / str(at))
        saved.append(image_options.output(image_options.load(tmp_path / str(at))))
    assert torch.equal(*saved)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_a_pipeline_fuses_and_unfuses_it(how, flux, tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    outputs = []
    for model in (image_options.load(flux, how), split(flux, how, tmp_path)):
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=add_lora(model), **parts)
        pipe.fuse_lora(components=["transformer"])
        seen = [image_options.output(model)]
        pipe.unfuse_lora(components=["transformer"])
        outputs.append([*seen, image_options.output(model)])
    assert all(map(torch.equal, *outputs))
    fused, unfused = outputs[0]
    assert not torch.equal(fused, unfused)


def test_a_text_encoder_that_is_offloaded(tmp_path):
    from accelerate import cpu_offload
    from diffusers import FluxPipeline  # noqa: F401  (each program with a text encoder has a pipeline)
    from diffusers.loaders import lora_base
    from peft import LoraConfig
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = CLIPTextModel(CLIPTextConfig(vocab_size=16, **sizes)).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # new biases are equal, and might be tied
    made.save_pretrained(tmp_path)
    outputs, ids = [], torch.arange(3, 11)[None]
    for offloaded in (False, True):
        model = CLIPTextModel.from_pretrained(tmp_path).eval()
        if offloaded:
            cpu_offload(model, execution_device=torch.device("cpu"))
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            seen = [model(ids).last_hidden_state]
            lora_base.fuse_text_encoder_lora(model)
            seen.append(model(ids).last_hidden_state)
            lora_base.unfuse_text_encoder_lora(model)
            outputs.append([*seen, model(ids).last_hidden_state])
    beside, fused, unfused = outputs[1]
    assert torch.equal(beside, outputs[0][0]) and torch.equal(fused, outputs[0][1])
    torch.testing.assert_close(fused, beside, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unfused, beside, rtol=1e-4, atol=1e-5)
