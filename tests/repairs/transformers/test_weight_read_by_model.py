"""Layers whose weight the model reads stay in floating point, and only these."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

import patches

transformers = pytest.importorskip("transformers")

from . import asking  # noqa: E402

pytestmark = pytest.mark.one_in(2)

ID = "transformers-weight-read-by-model"
SMALL = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
EXPERTS = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2}
MAMBA = {"vocab_size": 64, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 1, "time_step_rank": 8}
MODELS = {
    "longt5": ("AutoModelForSeq2SeqLM", lambda: transformers.LongT5Config(**SMALL)),
    "longt5 gated": (
        "AutoModelForSeq2SeqLM",
        lambda: transformers.LongT5Config(**SMALL, feed_forward_proj="gated-gelu"),
    ),
    "switch": ("AutoModelForSeq2SeqLM", lambda: transformers.SwitchTransformersConfig(**SMALL, **EXPERTS)),
    "mamba": ("AutoModelForCausalLM", lambda: transformers.MambaConfig(**MAMBA)),
}


def rounded(model: torch.nn.Module, plain: torch.nn.Module) -> torch.nn.Module:
    """``plain`` with the values that the quantized layers of ``model`` stand for."""
    for path in asking.quantized(model):
        weight = model.get_submodule(path).weight
        if type(weight) is bnb.nn.Params4bit:
            values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            values = weight.data.float() * model.get_submodule(path).state.SCB.view(-1, 1) / 127
        plain.get_submodule(path).weight.data = values.float()
    return plain


def outputs(model: torch.nn.Module) -> torch.Tensor:
    also = {"decoder_input_ids": asking.IDS} if model.config.is_encoder_decoder else {"use_cache": False}
    with torch.no_grad():
        return model(input_ids=asking.IDS, **also).logits


@pytest.mark.parametrize("name", MODELS)
def test_in_4_bits_it_is_the_rounded_model_also_saved_and_loaded(tmp_path, name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    getattr(transformers, kind).from_config(config()).save_pretrained(tmp_path / "plain")
    load = {"kind": kind, "torch_dtype": torch.float32}
    with patches.applied(ID):
        model = asking.load(tmp_path / "plain", asking.NF4, **load)
        model.save_pretrained(tmp_path / "packed")
    assert asking.quantized(model)
    expected = outputs(rounded(model, asking.load(tmp_path / "plain", **load)))
    for each in (model, asking.load(tmp_path / "packed", **load)):  # the latter without the plugin
        assert (outputs(each) - expected).norm() < 1e-2 * expected.norm()


def test_int8_is_as_before_where_the_model_knows_it(tmp_path):
    kind, config = MODELS["longt5"]
    getattr(transformers, kind).from_config(config()).save_pretrained(tmp_path)
    expected = asking.load(tmp_path, asking.INT8, kind)
    with patches.applied(ID):
        model = asking.load(tmp_path, asking.INT8, kind)
    assert asking.quantized(model) == asking.quantized(expected)
    assert model.config.to_dict() == expected.config.to_dict()


@pytest.mark.parametrize("how", asking.HOW)
def test_another_model_is_the_same(tmp_path, how):
    asking.llama(tmp_path)
    expected = asking.load(tmp_path, asking.HOW[how])
    with patches.applied(ID):
        model = asking.load(tmp_path, asking.HOW[how])
    assert model.config.to_dict() == expected.config.to_dict()
    assert torch.equal(asking.logits(model), asking.logits(expected))


@pytest.mark.parametrize("how", asking.HOW)
def test_a_table_that_is_made_in_the_dtype_of_a_weight(tmp_path, how):
    """Swin v2: the first layer of what its table of positions goes through stays in floating point."""
    config = transformers.Swinv2Config(
        image_size=16, patch_size=4, embed_dim=32, depths=[1], num_heads=[2], window_size=4, num_labels=4
    )
    transformers.Swinv2ForImageClassification(config).save_pretrained(tmp_path)
    load = {"kind": "Swinv2ForImageClassification", "torch_dtype": torch.float32}
    with patches.applied(ID):
        model = asking.load(tmp_path, asking.HOW[how], **load)
    assert asking.quantized(model)
    tables = {name: table for name, table in asking.load(tmp_path, **load).named_buffers() if "coords_table" in name}
    assert tables and all(torch.equal(model.get_buffer(name), table) for name, table in tables.items())
