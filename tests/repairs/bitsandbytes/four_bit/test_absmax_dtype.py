"""What a quantization state reads of a checkpoint is float32, whatever the file or torch's default dtype is."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit

import patches

ID = "bitsandbytes-absmax-dtype"
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def saved(nested: bool) -> tuple[Linear4bit, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    layer = Linear4bit(256, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested)
    layer = layer.to("cpu")
    return layer, {key: tensor.clone() for key, tensor in layer.state_dict().items()}


def read(entries: dict[str, torch.Tensor], device: str = "cpu") -> Params4bit:
    """As ``from_pretrained`` makes a weight of the entries of a file."""
    statistics = {key: tensor for key, tensor in entries.items() if key != "weight"}
    return Params4bit.from_prequantized(entries["weight"], statistics, device=device)


def cast(entries: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {key: t.to(dtype) if t.is_floating_point() else t for key, t in entries.items()}


def floats(state: QuantState) -> list[torch.Tensor]:
    return [
        state.code,
        *([state.absmax] if state.state2 is None else [state.state2.absmax, state.state2.code, state.offset]),
    ]


@HALF
@NESTED
def test_a_cast_checkpoint_stands_for_the_weights_that_it_holds(nested, dtype):
    layer, entries = saved(nested)
    with patches.applied(ID):
        weight = read(cast(entries, dtype))
        assert {tensor.dtype for tensor in floats(weight.quant_state)} == {torch.float32}
        found = dequantize_4bit(weight.data, weight.quant_state)
    expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


@NESTED
def test_what_is_float32_stays_as_it_was(nested):
    layer, entries = saved(nested)
    with patches.applied(ID):
        weight = read(dict(entries))
        found = dequantize_4bit(weight.data, weight.quant_state)
    assert torch.equal(found, dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    assert weight.quant_state.code.data_ptr() == entries["weight.quant_map"].data_ptr(), "no copy"


def test_the_offset_is_float32_whatever_the_default_dtype_is():
    layer, entries = saved(nested=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with patches.applied(ID):
            offset = read(entries).quant_state.offset
    finally:
        torch.set_default_dtype(torch.float32)
    assert offset.dtype == torch.float32 and torch.equal(offset, layer.weight.quant_state.offset)


@HALF
def test_statistics_that_were_cast_in_place_are_read_as_what_they_are(dtype):
    layer, _ = saved(nested=True)
    x = torch.randn(3, 256)
    expected = layer(x)
    outer = layer.weight.quant_state.state2
    outer.absmax, outer.code = outer.absmax.to(dtype), outer.code.to(dtype)
    with patches.applied(ID):
        torch.testing.assert_close(layer(x), expected, rtol=0.02, atol=0.02)


def test_codes_of_double_quantization_are_not_touched():
    _, entries = saved(nested=True)
    with patches.applied(ID):
        assert read(dict(entries)).quant_state.absmax.dtype == torch.uint8
