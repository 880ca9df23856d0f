"""What a program does with image models that are not quantized stays the same, to the bit, with each patch and with all."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import patches
from patches.repairs.reproducers import image_models

from . import image_options, offloaded_flux

peft = pytest.importorskip("peft")

IDS = [id for id in patches.REGISTRY.patches if id.startswith("diffusers-")]


def program(flux: Path) -> Iterator[torch.Tensor]:
    """Yield what it computes and writes."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    load = FluxTransformer2DModel.from_pretrained
    inputs = image_models.flux_inputs(torch.float32)

    def output(model):
        return image_options.output(model, torch.float32)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for places in (None, "cpu", {"": "cpu"}, "auto", "balanced"):
            yield output(load(flux, device_map=places))
        yield output(load(flux, device_map="auto", max_memory={"cpu": "1GB"}, torch_dtype=torch.float32))
        yield image_options.output(load(flux, torch_dtype=torch.bfloat16))
        model = offloaded_flux.add_lora(load(flux))
        model.enable_gradient_checkpointing()
        model.train()
        model(**inputs)[0].pow(2).mean().backward()
        yield from (each.grad for each in model.parameters() if each.grad is not None)
        model.eval()
        model.save_lora_adapter(folder / "adapter")
        yield from offloaded_flux.saved_tensors(folder / "adapter").values()
        again = load(flux)
        again.load_lora_adapter(folder / "adapter", weight_name="pytorch_lora_weights.safetensors", prefix=None)
        offloaded_flux.add_lora(again, 1, "second")
        again.set_adapters(["default", "second"], [0.5, 0.7])
        yield output(again)
        again.delete_adapters("second")
        again.fuse_lora(lora_scale=0.5)
        yield output(again)
        again.unfuse_lora()
        yield output(again)
        again.fuse_lora()
        again.unload_lora()
        again.save_pretrained(folder / "one")
        again.save_pretrained(folder / "shards", max_shard_size="100KB")
        again.save_pretrained(folder / "pickled", safe_serialization=False)
        for kept, how in (("one", {}), ("shards", {}), ("pickled", {"use_safetensors": False})):
            yield output(load(folder / kept, **how))
        yield output(copy.deepcopy(again).to(torch.float64).float())
        parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=again, **parts)
        yield output(pipe.to("cpu", torch.bfloat16).to(torch.float32).transformer)
        pipe.save_pretrained(folder / "pipeline")
        pipe = FluxPipeline.from_pretrained(folder / "pipeline", **parts)
        yield output(pipe.transformer)
        with torch.no_grad():
            yield pipe.transformer(**inputs)[0]


@pytest.fixture(scope="module")
def expected(flux):
    return list(program(flux))


@pytest.mark.parametrize("id", [*IDS, "all"])
def test_the_same_to_the_bit(id, expected, flux):
    with patches.applied(*(() if id == "all" else (id,))):
        found = list(program(flux))
    assert len(found) == len(expected) > 20
    assert all(one.dtype is two.dtype and torch.equal(one, two) for one, two in zip(found, expected))
