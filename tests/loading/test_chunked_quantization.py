"""A weight that is quantized in pieces on a CPU is the same as in one, to the bit."""

from __future__ import annotations

import pytest
import torch

from patches.loading import chunked_quantization

pytest.importorskip("bitsandbytes")
from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit  # noqa: E402

V, R = chunked_quantization.CHUNK_OF_4_BIT, chunked_quantization.CHUNK_OF_INT8
SIZES = {
    "two pieces": (2, V),
    "a long last piece": (3, V - 64),
    "a piece less than two": (1, 2 * V - 64),
    "part of a block": (2 * V + 30,),
}


def weights(size, dtype):
    """With a block of zeros and an outlier."""
    torch.manual_seed(0)
    weight = torch.randn(size).to(dtype)
    weight.view(-1)[:64] = 0
    weight.view(-1)[-7] = 300
    return weight


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride() and torch.equal(
        one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
    )  # fmt: skip


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype, storage, quant_type, nested", [
    (torch.bfloat16, torch.uint8, "nf4", True), (torch.float16, torch.bfloat16, "nf4", False),
    (torch.float32, torch.float32, "fp4", True),
])  # fmt: skip
def test_of_4_bits(size, dtype, storage, quant_type, nested):
    weight = weights(size, dtype)
    how = dict(compress_statistics=nested, quant_type=quant_type, quant_storage=storage)
    try:
        packed, state = quantize_4bit(weight, **how)
    except (RuntimeError, NotImplementedError) as error:  # FP4 and parts of blocks, on bitsandbytes 0.46
        with pytest.raises(type(error)):
            chunked_quantization.call_in_chunks(quantize_4bit)(weight, **how)
        return
    other, found = chunked_quantization.call_in_chunks(quantize_4bit)(weight, **how)
    assert same(other, packed)
    expected, found = state.as_dict(packed=True), found.as_dict(packed=True)
    assert expected.keys() == found.keys()
    assert all(same(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("size", [(5, R), (2 * R // 100 + 3, 100), (2, R), (2 * R + 1, 1)], ids=str)
def test_of_int8(size):
    weight = weights(size, torch.float16)
    packed, scales, _ = int8_vectorwise_quant(weight)
    other, found, columns = chunked_quantization.call_in_chunks(int8_vectorwise_quant)(weight)
    assert same(other, packed) and same(found, scales) and columns is None


def test_another_default_device():
    """What is made for the pieces lies where the weight does."""
    operators, weight = torch.ops.bitsandbytes, weights((2, R), torch.float16)

    def on_the_cpu(operator):
        def call(*args):
            with torch.device("cpu"):
                return operator(*args)

        return call

    with torch.device("meta"):
        of_4_bits = chunked_quantization._of_4_bits(
            on_the_cpu(operators.quantize_4bit.default), weight, 64, "nf4", torch.uint8
        )
        of_int8 = chunked_quantization._of_int8(on_the_cpu(operators.int8_vectorwise_quant.default), weight, 0.0)
    assert {tensor.device.type for tensor in (*of_4_bits, *of_int8[:2])} == {"cpu"}


def test_what_is_small_or_has_outliers_is_quantized_at_once():
    small, large = weights((64, 64), torch.float16), weights((5, R), torch.float16)
    of_4_bits = chunked_quantization.call_in_chunks(quantize_4bit)(small, quant_type="nf4")[0]
    assert same(of_4_bits, quantize_4bit(small, quant_type="nf4")[0])
    expected, found = (
        int8_vectorwise_quant(large, 6.0),
        chunked_quantization.call_in_chunks(int8_vectorwise_quant)(large, 6.0),
    )
    assert all(same(one, other) for one, other in zip(found, expected)) and len(found[2]) > 0
