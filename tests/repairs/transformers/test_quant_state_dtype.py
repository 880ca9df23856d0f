"""4-bit layers of a checkpoint dequantize in the dtype that was asked for."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch

import patches

pytest.importorskip("transformers")

from . import asking  # noqa: E402

ID = "transformers-quant-state-dtype"


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("asked", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_states_have_it_and_packed_weights_are_the_same(tmp_path, double, asked):
    asking.llama(tmp_path / "plain")
    how = {**asking.NF4, "bnb_4bit_use_double_quant": double}
    first = asking.load(tmp_path / "plain", how, torch_dtype=torch.bfloat16)
    first.save_pretrained(tmp_path / "packed")
    with patches.applied(ID):
        model = asking.load(tmp_path / "packed", torch_dtype=asked)
    for path in asking.quantized(model):
        weight, before = model.get_submodule(path).weight, first.get_submodule(path).weight
        assert weight.quant_state.dtype is asked and torch.equal(weight.data, before.data)
        assert torch.equal(weight.quant_state.absmax, before.quant_state.absmax)
        values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert values.dtype is asked
        before.quant_state.dtype = asked
        assert torch.equal(values, bitsandbytes.functional.dequantize_4bit(before.data, before.quant_state))


def test_a_model_that_is_quantized_while_it_loads_is_the_same(tmp_path):
    asking.llama(tmp_path)
    expected = asking.load(tmp_path, asking.NF4, torch_dtype=torch.float16)
    with patches.applied(ID):
        model = asking.load(tmp_path, asking.NF4, torch_dtype=torch.float16)
    assert torch.equal(asking.logits(model), asking.logits(expected))
