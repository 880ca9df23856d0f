"""Quantized experts on the device: loading and training need the memory of packed weights, and not of floating point."""

from __future__ import annotations

import pytest
import torch
import transformers

import patches
from patches.experts import dense_operations
from patches.experts import packed_experts
from patches.experts.experts_in_model import find_experts
from patches.quantized.quantized_experts import is_quantized_experts
from tests.device import watch
from tests.device.models import quantization

pytestmark = pytest.mark.usefixtures("patched")

KINDS = ("nf4", "nf4-nested", "int8")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Four layers of 3 MB of experts in bfloat16, in shards."""
    sizes = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=128, **sizes
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2MB")
    return folder


@pytest.fixture(scope="module")
def packed(mixture, tmp_path_factory):
    """The same, saved with experts in 4 bits."""
    folder = tmp_path_factory.mktemp("packed")
    load(mixture, {"": "cpu"}, "nf4").save_pretrained(folder, max_shard_size="1MB")
    return folder


def load(folder, device_map, kind=None, **options):
    options.update({"dtype": torch.bfloat16, "device_map": device_map})
    if kind is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    with patches.quantize_experts():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization(kind), **options
        )


def of_a_layer(model):
    """Bytes of a layer's experts in the precision of the checkpoint."""
    layer = model.model.layers[0].mlp.experts
    return sum(parameter.numel() * 2 for parameter in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_loading_takes_the_packed_size_and_a_layer(mixture, kind, device, by_the_name_of_cuda):
    with watch.peak() as most:
        model = load(mixture, {"": device}, kind)
    whole = sum(parameter.numel() * 2 for parameter in model.parameters())
    assert all(is_quantized_experts(one.parameter) for one in find_experts(model))
    assert most[0] <= model.get_memory_footprint() + of_a_layer(model) + 2**19 < 0.9 * whole


def test_loading_what_is_packed(packed, device, by_the_name_of_cuda):
    with watch.peak() as most:
        model = load(packed, {"": device})
    assert all(is_quantized_experts(one.parameter) for one in find_experts(model))
    assert most[0] <= 1.5 * model.get_memory_footprint()


@pytest.mark.parametrize("form", ["quantized", "packed"])
def test_a_device_map_counts_packed_experts(mixture, packed, form, device, by_the_name_of_cuda):
    """In so much memory the model fits, of which floating point would leave a half to the CPU."""
    whole = load(mixture, {"": "cpu"}, "nf4")
    room = {0: int(1.3 * whole.get_memory_footprint()), "cpu": "1GB"}
    folder, kind = (mixture, "nf4") if form == "quantized" else (packed, None)
    model = load(folder, "auto", kind, max_memory=room)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])  # grouped_mm: CPU kernels have no histc of integers
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_step_keeps_no_expert_in_floating_point(
    mixture, implementation, checkpointing, at_once, device, by_the_name_of_cuda, monkeypatch
):
    """Beyond packed weights and what floating point takes for activations: the matrices of as many as it is told."""
    took, size = {}, {}
    monkeypatch.setattr(packed_experts, "BYTES_AT_ONCE", at_once * 2 * 256 * 128)
    for kind in ("nf4", None):
        model = load(mixture, {"": device}, kind, experts_implementation=implementation)
        experts = [one.parameter for one in find_experts(model)]
        few = (1 + at_once) * 2 * sum(parameter[0].numel() for parameter in experts[:2])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        dense_operations.COUNTS.clear()
        took[kind], size[kind] = step(model, device), sum(parameter.nbytes for parameter in experts)
        del model, experts
    assert took["nf4"] <= took[None] + few and not dense_operations.COUNTS
    if implementation == "eager" and at_once == 1:  # batched_mm in floating point copies an expert for each token
        assert took["nf4"] + size["nf4"] <= 0.35 * (took[None] + size[None])


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested"])
def test_several_experts_dequantized_at_once_are_the_same_to_the_bit(
    mixture, kind, device, by_the_name_of_cuda, monkeypatch
):
    model = load(mixture, {"": device}, kind)
    for one in list(find_experts(model))[:2]:  # with two matrices in an expert, and with one
        experts = one.parameter
        for numbers in (list(range(32)), [3, 4, 5], [31, 2, 2, 17]):
            monkeypatch.setattr(packed_experts, "BYTES_AT_ONCE", 3 * 2 * experts[0].numel())
            with watch.watch() as seen:
                several = list(experts.iter_dequantized(numbers))
            monkeypatch.setattr(packed_experts, "BYTES_AT_ONCE", 0)
            with watch.watch() as alone:
                expected = list(experts.iter_dequantized(numbers))
            assert len(several) == len(numbers) and all(map(torch.equal, several, expected))
            at_once, each = (found.kernels.count("bitsandbytes::dequantize_4bit") for found in (seen, alone))
            assert at_once < each


def step(model, device):
    """The most that a second training step allocates; what trains is the embedding."""
    model.train().requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    ids = torch.arange(8, device=device)[None]
    for _ in range(2):
        with watch.peak() as most:
            model(input_ids=ids, labels=ids).loss.backward()
        embedding.grad = None
    return most[0]
