"""Models whose layers are on the disk, for the tests of what goes wrong with them."""

from __future__ import annotations

import gc
import os

import torch

from patches.repairs.reproducers.tiny_models import in_dtype

SIZE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
IDS = torch.arange(8)[None]
PLACES = {"": "cpu", "model.layers": "disk"}


def make(seed=0):
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **SIZE))


def load(folder, places=None, **options):
    """In 4 bits, with the layers on the disk if ``places`` does not say otherwise."""
    import transformers

    if not folder.name.startswith("quantized"):
        options["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    places = PLACES if places is None else places
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, device_map=places, **in_dtype(torch.float32), **options
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def left(off):
    gc.collect()
    return sorted(os.listdir(off)) if off.exists() else []


def assert_a_second_try_works(plain, off, expected):
    assert left(off) == [], "something was left behind"
    assert torch.equal(logits(load(plain, offload_folder=off)), expected)
    assert left(off) == []
