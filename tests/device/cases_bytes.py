"""What each use of an offloaded layer brings to the device, counted there: its packed weights, once."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import transformers

import patches
from patches.repairs.reproducers.tiny_models import in_dtype
from tests.device import watch
from tests.device.models import QUANTIZED, add_lora, batch, half, load, logits, quantization, save_llama

pytestmark = pytest.mark.usefixtures("patched", "by_the_name_of_cuda")

LAYERS = 4
OF_16_BITS = {"int8": 1 / 2, "nf4": 1 / 4, "nf4-nested": 1 / 4}
TIED = {"": 0, "model.embed_tokens": "disk", "lm_head": "disk"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide enough that packed weights are most of a layer."""
    return save_llama(tmp_path_factory.mktemp("wide"), layers=LAYERS, hidden=128)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def forward(model, device):
    """Bytes to the device of one, less those of its tokens."""
    logits(model, device)
    with watch.watch() as seen:
        logits(model, device)
    return seen.moved("host to device") - batch("cpu").nbytes


def said(model):
    """What ``patches.inspect`` says."""
    return sum(sum(place.brings.values()) for place in patches.inspect(model).facts.places)


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_use(kind, place, wide, device, tmp_path, caplog):
    places = half(device, place, LAYERS)
    with caplog.at_level(logging.INFO, "bnb_patches"):
        model = load(wide, kind, places, offload_folder=tmp_path)
    once = forward(model, device)
    assert once == said(model)
    (line,) = (record.message for record in caplog.records if "is quantized and placed on" in record.message)
    number, unit = re.search(r"copies ([\d.]+) (kB|MB) from the CPU or the disk to cuda:0", line).groups()
    assert float(number) * {"kB": 1e3, "MB": 1e6}[unit] == pytest.approx(once, rel=0.01)
    plain = forward(load(wide, "plain", places, offload_folder=tmp_path), device)
    assert OF_16_BITS[kind] <= once / plain <= OF_16_BITS[kind] + 0.02, "norms in 16 bits, row scales"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["no", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["int8", "nf4-nested"])
def test_a_step(kind, place, checkpointing, wide, device, tmp_path):
    """Forward and backward bring a layer once each; with checkpointing the recomputation is part of the backward."""
    model = add_lora(load(wide, kind, half(device, place, LAYERS), offload_folder=tmp_path), checkpointing)
    once, tokens = said(model), batch(device)
    for _ in range(2):
        with watch.watch() as seen:
            model(input_ids=tokens, labels=tokens).loss.backward()
    moved = seen.moved("host to device")
    if checkpointing is None:  # autograd keeps norms and row scales for the backward
        assert 1.95 * once <= moved <= 2 * once
    else:
        assert moved == 2 * once


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_tied_weights_are_brought_for_each_module(kind, tied, device, tmp_path):
    model = load(tied, kind, TIED, offload_folder=tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    once = forward(model, device)
    assert once == said(model) == 2 * model.lm_head.weight.nbytes


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_an_embedding_that_encoder_and_decoder_share_counts_for_these(name, place, device, tmp_path):
    """``shared`` itself is never called. In T5 of transformers 4 it is the same module as those that are; else a third one."""
    sizes = {
        "T5": dict(d_kv=32, d_ff=64, num_layers=1, num_heads=2),
        "Bart": dict(
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 1), max_position_embeddings=64,
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        ),
    }[name]  # fmt: skip
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    made = kind(getattr(transformers, f"{name}Config")(vocab_size=64, d_model=64, pad_token_id=1, **sizes))
    made.bfloat16().save_pretrained(tmp_path / "plain")
    stays = "encoder.final_layer_norm" if name == "T5" else "model.encoder.layernorm_embedding"
    how = {"quantization_config": quantization("nf4"), **in_dtype(torch.bfloat16), "offload_folder": tmp_path / "off"}
    model = kind.from_pretrained(tmp_path / "plain", device_map={"": place, stays: device}, **how)
    tokens = batch(device)
    for _ in range(2):  # the first forward leaves each module a parameter of its own
        once = said(model)
        with torch.no_grad(), watch.watch() as seen:
            model(input_ids=tokens, decoder_input_ids=tokens)
    assert seen.moved("host to device") == once


def test_int8_weights_on_the_disk_are_read_once(wide, device, tmp_path, monkeypatch):
    """Looking for row scales read the weight twice more."""
    model = load(wide, "int8", half(device, "disk", LAYERS), offload_folder=tmp_path)
    loader = model.model.layers[-1].mlp.up_proj._hf_hook.weights_map.dataset
    read = []
    original = type(loader).__getitem__
    monkeypatch.setattr(type(loader), "__getitem__", lambda self, key: read.append(key) or original(self, key))
    logits(model, device)
    weights = [key for key in read if key.endswith("_proj.weight")]
    assert len(weights) == len(set(weights)) == 2 * 7
    assert torch.isfinite(logits(model, device)).all()
