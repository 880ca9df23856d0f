"""Floating-point tensors of a quantized checkpoint have the dtype that was asked for."""

from __future__ import annotations

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 4 casts them")

from . import asking  # noqa: E402

ID = "transformers-checkpoint-keeps-dtype"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LLAVA = "LlavaForConditionalGeneration"
STORED = {"nf4 in bf16": {**asking.NF4, "bnb_4bit_quant_storage": torch.bfloat16}, **asking.HOW}


def floating(model: torch.nn.Module) -> set[torch.dtype]:
    """The dtypes of what is not packed."""
    packed = {f"{path}.weight" for path in asking.quantized(model)}
    return {p.dtype for name, p in model.named_parameters() if name not in packed}


def bits(layer: torch.nn.Module) -> torch.Tensor:
    """Packed weights, of which some are NaN as numbers."""
    return layer.weight.data.view(torch.uint8)


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_each_pair_of_dtypes(tmp_path, how, stored):
    asking.llama(tmp_path / "plain", attention_bias=True)
    first = asking.load(tmp_path / "plain", STORED[how], dtype=stored)
    first.save_pretrained(tmp_path / "packed")
    for asked in DTYPES:
        with patches.applied(ID):
            model = asking.load(tmp_path / "packed", dtype=asked)
        assert floating(model) == {asked} and model.dtype == asked
        for path in asking.quantized(model):
            assert torch.equal(bits(model.get_submodule(path)), bits(first.get_submodule(path)))
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in asking.quantized(model):
                assert torch.equal(parameter, first.get_parameter(name).to(asked)), name


def test_names_that_differ_between_file_and_model(tmp_path):
    asking.llava(tmp_path / "plain")
    skip = {"llm_int8_skip_modules": ["model.vision_tower", "lm_head"]}
    how = {**asking.NF4, **skip}
    asking.load(tmp_path / "plain", how, LLAVA, dtype=torch.bfloat16).save_pretrained(tmp_path / "packed")
    with patches.applied(ID):
        assert floating(asking.load(tmp_path / "packed", kind=LLAVA, dtype=torch.float16)) == {torch.float16}


@pytest.mark.parametrize("how", asking.HOW)
@pytest.mark.parametrize("also", [{}, {"dtype": "auto"}, {"dtype": torch.bfloat16}], ids=["left out", "auto", "same"])
def test_in_the_dtype_of_the_file_it_is_the_same(tmp_path, how, also):
    asking.llama(tmp_path / "plain")
    asking.load(tmp_path / "plain", asking.HOW[how], dtype=torch.bfloat16).save_pretrained(tmp_path / "packed")
    expected = asking.load(tmp_path / "packed", **also)
    with patches.applied(ID):
        model = asking.load(tmp_path / "packed", **also)
    assert floating(model) == floating(expected) == {torch.bfloat16}
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


def test_a_plain_checkpoint_is_cast_as_before(tmp_path):
    asking.llama(tmp_path)
    expected = asking.load(tmp_path, dtype=torch.float16)
    with patches.applied(ID):
        model = asking.load(tmp_path, dtype=torch.float16)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
