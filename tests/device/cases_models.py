"""Models on a device map: loaded, trained, saved and loaded again as whole on one device.

LoRA comes before the offloading here. After it, which is what users write, is in ``cases_adapters.py``.
"""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.device import watch
from tests.device.layers import CHECKPOINTING
from tests.device.models import (
    KINDS, QUANTIZED, add_lora, assert_same_training, assert_too_large, batch, half, load, logits, quantized_layers,
    save_llama, train,
)  # fmt: skip

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("patched")]

RESTS = ("cpu", "disk", "other")


@pytest.fixture(params=RESTS)
def rest(request, other) -> str:
    """Where the second half of the decoder layers is."""
    return other if request.param == "other" else request.param


def dispatched(model: torch.nn.Module, device: str, rest: str, folder: Path) -> torch.nn.Module:
    """A model that was whole on a device, on a map now."""
    remove_hook_from_module(model, recurse=True)
    accelerate.dispatch_model(model, half(device, rest), main_device=device, offload_dir=folder, force_hooks=True)
    layer = next(quantized_layers(model.model.layers[1]), model.model.layers[1].mlp.up_proj)
    assert str(layer.weight.device) == ("meta" if rest in ("cpu", "disk") else rest)
    return model


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_lora_whose_base_layers_are_offloaded(kind, checkpointing, device, llama):
    reentrant = CHECKPOINTING[checkpointing]
    whole = train(add_lora(load(llama, kind, {"": device}), reentrant), device)
    model = add_lora(load(llama, kind, {"": device}), reentrant)
    for layer in list(quantized_layers(model.get_base_model().model.layers[1])):
        accelerate.cpu_offload(layer, device)
    assert_same_training(train(model, device), whole)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("kind", ["int8", "nf4-nested"])
def test_lora_with_activations_on_the_cpu(kind, pinned, device, llama):
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):  # pinned it forgets strides: other kernels, other bits
        whole = train(add_lora(load(llama, kind, {"": device})), device)
    model = add_lora(load(llama, kind, {"": device}))
    for layer in list(quantized_layers(model.get_base_model().model.layers[1])):
        accelerate.cpu_offload(layer, device)
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        assert_same_training(train(model, device), whole)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_lora_over_two_devices(kind, device, other, llama):
    whole = train(add_lora(load(llama, kind, {"": device}), False), device)
    split = train(add_lora(load(llama, kind, half(device, other)), False), device)
    assert_same_training(split, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_dispatched(kind, rest, device, llama, tmp_path):
    whole = load(llama, kind, {"": device})
    embedded = torch.randn(1, 4, 64, dtype=torch.bfloat16).to(device).requires_grad_()
    whole(inputs_embeds=embedded).logits.float().square().sum().backward()
    gradient, embedded.grad = embedded.grad, None
    model = dispatched(load(llama, kind, {"": device}), device, rest, tmp_path)
    for _ in range(2):
        assert torch.equal(logits(model, device), logits(whole, device))
    model(inputs_embeds=embedded).logits.float().square().sum().backward()
    assert torch.equal(embedded.grad, gradient)


@pytest.mark.parametrize("kind", ["int8", "nf4-nested"])
def test_generating(kind, rest, device, llama, tmp_path):
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = load(llama, kind, {"": device}).generate(batch(device), **options)
    model = dispatched(load(llama, kind, {"": device}), device, rest, tmp_path)
    assert torch.equal(model.generate(batch(device), **options), expected)


@pytest.mark.parametrize("place", ["name", "number"])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_on_a_map(kind, rest, place, device, other, llama, tmp_path, by_the_name_of_cuda):
    """What is on CPU or disk stays in floating point: transformers says so and asks for a flag."""
    options, skipped = {}, None
    if rest != other and kind != "plain":
        options = {"llm_int8_enable_fp32_cpu_offload": True}
        skipped = {"llm_int8_skip_modules": ["lm_head", "model.layers.1"]}
    expected = logits(load(llama, kind, {"": device}, skipped), device)
    first, second = (device, rest) if place == "name" else (0, 1 if rest == other else rest)
    model = load(llama, kind, half(first, second), options, offload_folder=tmp_path)
    for _ in range(2):
        assert torch.equal(logits(model, device), expected)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_map_that_accelerate_makes(kind, device, other, llama, by_the_name_of_cuda):
    expected = logits(load(llama, kind, {"": device}), device)
    assert torch.equal(logits(load(llama, kind, "auto"), device), expected)
    model = load(llama, kind, "auto", max_memory={0: 140_000, 1: 200_000, "cpu": 10**9})
    assert set(model.hf_device_map.values()) == {0, 1}
    assert torch.equal(logits(model, device), expected)


@pytest.mark.parametrize("kind", ["int8", "nf4-nested"])
def test_load_and_quantize_model(kind, rest, device, other, llama, tmp_path, by_the_name_of_cuda):
    """accelerate quantizes INT8 on its way to the disk, and leaves 4-bit layers there in floating point."""
    skipped = {"llm_int8_skip_modules": ["lm_head", "model.layers.1"]} if rest != other and kind != "int8" else None
    expected = logits(load(llama, kind, {"": device}, skipped), device)
    options = dict(torch_dtype=torch.bfloat16, skip_modules=["lm_head"])
    if kind == "int8":
        config = BnbQuantizationConfig(load_in_8bit=True, **options)
    else:
        config = BnbQuantizationConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16, **options,
        )  # fmt: skip
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(llama, attn_implementation="eager"))
    weights = str(llama / "model.safetensors")
    place = half(0, 1 if rest == other else rest)
    model = load_and_quantize_model(model, config, weights, device_map=place, offload_folder=tmp_path)
    for _ in range(2):
        assert torch.equal(logits(model, device), expected)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_saved_and_loaded_on_each_device(kind, device, other, llama, tmp_path):
    model = load(llama, kind, {"": device})
    expected = logits(model, device)
    model.save_pretrained(tmp_path)
    for place in (device, other, "cpu"):
        again = AutoModelForCausalLM.from_pretrained(
            tmp_path, device_map={"": place}, dtype=torch.bfloat16, attn_implementation="eager"
        )
        assert torch.equal(logits(again, place), expected)


def test_what_does_not_fit_whole_runs_on_a_map(device, tmp_path, llama):
    folder = save_llama(tmp_path / "large", layers=8)
    load(folder, "int8", {"": device})  # code books are made once
    before = watch.held()
    whole = load(folder, "int8", {"": device})
    size, expected = watch.held() - before, logits(whole, device)
    del whole
    with watch.limited_to(int(0.75 * size)):
        assert_too_large(lambda: load(folder, "int8", {"": device}))
        model = load(folder, "int8", {"": "cpu"})
        remove_hook_from_module(model, recurse=True)
        accelerate.dispatch_model(model, half(device, "cpu", 8), main_device=device, force_hooks=True)
        assert torch.equal(logits(model, device), expected)
