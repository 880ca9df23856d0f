"""One layer on a CPU with AVX512-BF16: what an eval forward computes, and what it leaves alone."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit

import patches
from patches import REGISTRY
from patches.quantized.four_bit.quant_states import canonical_state
from patches.repairs.bitsandbytes.four_bit.cpu_repack import PACKED_COPIES

from .cpu_layers import ID, NESTED, QUIET, holds_a_copy, infer, inputs, make, never, patched, relative, same_state

__all__ = ["patched"]
pytestmark = QUIET
STORAGE = {"storage-uint8": torch.uint8, "storage-bfloat16": torch.bfloat16}


def test_the_reproducer():
    """``verify`` cannot show it where the processor is emulated: present, absent, present again."""
    defect = REGISTRY.patches[ID].defect
    assert not defect()
    patches.revert()
    assert defect()
    with patches.applied(ID):
        assert not defect()
    assert defect()


@NESTED
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_an_eval_forward_changes_nothing(kind, storage, nested):
    layer = make(nested, quant_type=kind, quant_storage=STORAGE[storage])
    clean, weight = never(layer), dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    out = infer(layer, inputs())
    assert holds_a_copy(layer)
    assert relative(out, infer(clean, inputs())) < 0.01  # both round to bf16
    assert torch.equal(dequantize_4bit(layer.weight.data, layer.weight.quant_state), weight)
    assert vars(layer.weight.quant_state).keys() == vars(clean.weight.quant_state).keys()
    assert same_state(layer, clean)
    assert torch.equal(infer(layer, inputs()), out)  # after state_dict() too


@NESTED
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128), (1, 128), (128,)], ids=str)
def test_the_kernel_is_kept_bit_by_bit(shape, kind, bias, nested):
    """The output of an eval forward is the one that bitsandbytes itself gives on this processor."""
    layer = make(nested, bias=bias, quant_type=kind)
    out = infer(layer, inputs(*shape))
    patches.revert()
    assert torch.equal(out, infer(layer, inputs(*shape)))
    assert layer.weight.quant_state.packing_format_for_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_compute_dtypes_too(dtype):
    layer, x = make(compute_dtype=dtype), inputs().to(dtype)
    out = infer(layer, x)
    assert holds_a_copy(layer) and out.dtype is dtype
    patches.revert()
    assert torch.equal(out, infer(layer, x))


@NESTED
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["e", "te", "ettee"])
def test_eval_and_train_in_any_order(order, bias, nested):
    layer = make(nested, bias=bias)
    clean = never(layer)
    for letter in order + "t":
        if letter == "e":
            infer(layer.eval(), inputs())
            continue
        results = []
        for model in (layer.train(), clean.train()):
            model.zero_grad()
            x = inputs(grad=True)
            out = model(x)
            out.float().square().sum().backward()
            results.append([out, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
        assert all(map(torch.equal, *results))
    assert same_state(layer, clean)


def true_weight(layer: Linear4bit) -> torch.Tensor:
    """By a kernel that is right on every processor: of one row."""
    state = layer.weight.quant_state
    rows, columns = state.shape
    absmax = scales(layer)
    flat = torch.ops.bitsandbytes.dequantize_4bit(
        layer.weight.data, absmax, state.blocksize, state.quant_type, [rows * columns], torch.bfloat16
    )
    return flat.view(rows, columns)


@NESTED
@pytest.mark.parametrize("bias", ["none", "frozen", "learns"])
@pytest.mark.parametrize("shape", [(128, 48), (96, 128), (80, 64), (64, 100), (128, 20), (72, 64)], ids=str)
def test_shapes_that_the_kernel_cannot_compute(shape, bias, nested):
    """Among them widths that are no multiple of the block size, whose scales AVX512 takes from other blocks."""
    layer, x = make(nested, shape=shape, bias=bias != "none"), inputs(3, shape[0])
    if bias == "frozen":
        layer.bias.requires_grad_(False)
    out = layer(x)
    assert torch.equal(out, torch.nn.functional.linear(x, true_weight(layer), layer.bias))
    if bias == "learns":
        out.sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((shape[1],), 3.0, dtype=torch.bfloat16))
    assert not holds_a_copy(layer)
    patches.revert()
    with pytest.raises((AssertionError, RuntimeError)):
        infer(layer, x)


@NESTED
def test_inputs_that_the_kernel_reads_wrongly(nested):
    """It takes every row to be contiguous; with an empty input it ends the process (SIGFPE)."""
    layer = make(nested)
    transposed = inputs(128, 5).t()
    assert torch.equal(infer(layer, transposed), infer(layer, transposed.contiguous()))
    assert infer(layer, torch.empty(0, 128, dtype=torch.bfloat16)).shape == (0, 64)


def test_inputs_of_the_wrong_width_raise_as_ever():
    layer = make()
    for model in (layer, never(layer)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            infer(model, inputs(3, 96))


def test_a_layer_from_an_older_release():
    """It never asked the processor; on other devices nothing does."""
    layer = make().train()
    del layer.support_avx512bf16_for_cpu
    assert canonical_state(layer, torch.compiler.is_compiling, PACKED_COPIES) is layer.weight.quant_state


def test_a_bias_that_learns_in_eval_mode():
    layer = make(bias=True)
    layer(inputs()).float().sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((64,), 5.0, dtype=torch.bfloat16))


def test_who_traces_or_transforms_gets_operators_that_torch_knows():
    """The kernel is called past the dispatcher: a trace would hold an empty tensor, a tangent would be lost."""
    layer, x, tangent = make().requires_grad_(False), inputs(), torch.randn(5, 128).bfloat16()
    weight = true_weight(layer)
    infer(layer, x)
    traced = torch.jit.trace(layer, (torch.zeros_like(x),), check_trace=False)
    assert torch.equal(traced(x), x @ weight.T)
    assert torch.equal(torch.func.jvp(layer, (x,), (tangent,))[1], tangent @ weight.T)
    assert relative(torch.func.vmap(layer)(x[:, None])[:, 0], x @ weight.T) < 0.01
    with torch.device("meta"):  # what is made on the way is made where the input is
        assert layer(x).device.type == "cpu"


# -- weights that were repacked before the patch ---------------------------------------------------


def damaged(nested: bool) -> tuple[Linear4bit, Linear4bit]:
    layer = make(nested)
    clean = never(layer)
    patches.revert()
    infer(layer, inputs())
    assert layer.weight.quant_state.packing_format_for_cpu
    report = patches.apply(ID)
    assert any("repacked" in note for note in report[ID].notes)
    return layer, clean


def scales(layer: Linear4bit) -> torch.Tensor:
    state = layer.weight.quant_state
    if not state.nested:
        return state.absmax
    return bitsandbytes.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset


@NESTED
@pytest.mark.parametrize("first", ["eval", "train", "state_dict"])
def test_a_weight_repacked_before_is_unpacked(first, nested):
    layer, clean = damaged(nested)
    if first == "state_dict":
        layer.state_dict()
    else:
        infer(layer.train(first == "train"), inputs())
    assert torch.equal(layer.weight, clean.weight)  # the codes, exactly
    assert torch.equal(scales(layer), scales(clean).bfloat16().float())  # the scales, as rounded
    assert not layer.weight.quant_state.packing_format_for_cpu
    if not nested:  # the largest of bf16 numbers is one
        assert torch.equal(scales(layer), scales(clean))
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert relative(weight, dequantize_4bit(clean.weight.data, clean.weight.quant_state)) < 0.005
    x = inputs(grad=True)
    layer.train()(x).float().sum().backward()
    assert x.grad is not None
