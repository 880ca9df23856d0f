"""The packed copy is never used for other contents than it was made from, whatever way they were written."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from .cpu_layers import (
    LARGE, NESTED, QUIET, SMALL, another, copies, holds_a_copy, infer, inputs, made, make, never, patched, relative,
)  # fmt: skip

__all__ = ["made", "patched"]
pytestmark = QUIET
SHAPE = pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])


def check(layer: Linear4bit, write: Callable[[], None], mode: Callable = torch.no_grad) -> None:
    """What ``layer`` computes before and after ``write`` is what it holds, also at the tenth call."""
    x = inputs(5, layer.in_features)
    with mode():
        before = [layer(x) for _ in range(10)]
    assert holds_a_copy(layer) and all(torch.equal(out, before[0]) for out in before)
    write()
    with mode():
        true = never(layer)(x)
        assert relative(before[0], true) > 0.1, "the case writes something that matters"
        for _ in range(10):
            assert relative(layer(x), true) < 0.01
    assert holds_a_copy(layer), "a copy that was used ten times may be made again at once"


# -- writes that torch counts ----------------------------------------------------------------------


def write_weight(layer: Linear4bit, other: Linear4bit) -> None:
    with torch.no_grad():
        layer.weight.copy_(other.weight)


def write_view(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.detach().view(-1)[layer.weight.numel() // 2 :] = 255


def assign_data(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.data = other.weight.data.clone()


def set_storage(layer: Linear4bit, other: Linear4bit) -> None:
    with torch.no_grad():
        layer.weight.set_(other.weight.data.clone())


def assign_parameter(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight = copy.deepcopy(other.weight)


def load(layer: Linear4bit, other: Linear4bit) -> None:
    with torch.no_grad():
        for mine, theirs in zip(layer.parameters(), other.parameters()):
            mine.copy_(theirs)


def write_scales(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.quant_state.absmax.copy_(other.weight.quant_state.absmax)


def assign_scales(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.quant_state.absmax = other.weight.quant_state.absmax.clone()


def assign_state(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.quant_state = copy.deepcopy(other.weight.quant_state)


COUNTED = [
    write_weight, write_view, assign_data, set_storage, assign_parameter, load,
    write_scales, assign_scales, assign_state,
]  # fmt: skip


@NESTED
@SHAPE
@pytest.mark.parametrize("write", COUNTED)
def test_follows_what_torch_counts(write, shape, nested):
    layer, other = make(nested, shape), another(nested, shape)
    check(layer, lambda: write(layer, other))


# -- writes that it does not -----------------------------------------------------------------------


def copy_through_data(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.data.copy_(other.weight.data)


def write_with_numpy(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.detach().numpy()[:] = other.weight.detach().numpy()


def scales_through_data(layer: Linear4bit, other: Linear4bit) -> None:
    layer.weight.quant_state.absmax.data.copy_(other.weight.quant_state.absmax)


UNCOUNTED = [copy_through_data, write_with_numpy, scales_through_data]


@NESTED
@SHAPE
@pytest.mark.parametrize("write", UNCOUNTED)
def test_follows_what_torch_does_not_count(write, shape, nested):
    layer, other = make(nested, shape), another(nested, shape)
    versions = layer.weight._version, layer.weight.quant_state.absmax._version
    check(layer, lambda: write(layer, other))
    assert (layer.weight._version, layer.weight.quant_state.absmax._version) == versions


@SHAPE
@pytest.mark.parametrize("part", ["offset", "absmax", "code"])
def test_follows_the_statistics_of_nested_scales(part, shape):
    layer = make(True, shape)
    state = layer.weight.quant_state
    held = state.offset if part == "offset" else getattr(state.state2, part)
    check(layer, lambda: held.data.mul_(3))


@SHAPE
def test_a_buffer_that_layers_are_streamed_through(shape):
    layer, other = make(shape=shape), another(shape=shape)
    buffer = layer.weight.data.clone()
    layer.weight.data = buffer
    check(layer, lambda: buffer.copy_(other.weight.data))


@SHAPE
def test_weights_made_and_written_in_inference_mode(shape):
    with torch.inference_mode():
        layer, other = make(shape=shape), another(shape=shape)

    def write() -> None:
        with torch.inference_mode():
            layer.weight.copy_(other.weight)

    check(layer, write, torch.inference_mode)


def test_one_row_of_a_large_weight_through_data():
    """And one code, which is noticed when its place in the weight comes."""
    layer, x = make(shape=LARGE), inputs(1, LARGE[0])
    columns = LARGE[0] // 2
    for start, count in ((3 * columns, 3 * columns), (0, 8), (len(layer.weight) - 1, 1)):
        infer(layer, x)
        layer.weight.data.view(-1)[start : start + count] ^= 255
        true = infer(never(layer), x)
        calls = next(i for i in range(1, 129) if relative(infer(layer, x), true) < 0.005)
        assert calls == 1 if count > columns else calls <= 127


# -- what belongs to it ----------------------------------------------------------------------------


def test_does_not_travel_in_copies_and_pickles():
    layer = make()
    before = io.BytesIO()
    torch.save(layer, before)
    infer(layer, inputs())
    after = io.BytesIO()
    torch.save(layer, after)
    assert after.getvalue() == before.getvalue()
    assert not holds_a_copy(copy.deepcopy(layer))


def test_is_freed_with_its_weight_and_when_the_weight_moves():
    for leave in ("replaced", "emptied", "deleted"):
        layer = make()
        infer(layer, inputs())
        packed = weakref.ref(*copies(layer).values())
        assert packed() is not None
        if leave == "replaced":
            layer.weight = copy.deepcopy(layer.weight)
        elif leave == "emptied":
            layer.weight.data = torch.empty(0, dtype=torch.uint8)
        else:
            del layer
        gc.collect()
        assert packed() is None, leave


@NESTED
def test_is_freed_where_weight_and_scales_share_their_memory(nested):
    layer = make(nested)
    size, absmax = layer.weight.nbytes, layer.weight.quant_state.absmax
    memory = torch.empty(size + absmax.nbytes, dtype=torch.uint8)
    memory[:size] = layer.weight.data.view(-1)
    memory[size:] = absmax.view(torch.uint8)
    layer.weight.data = memory[:size].view(-1, 1)
    layer.weight.quant_state.absmax = memory[size:].view(absmax.dtype)
    expected = infer(never(layer), inputs())
    assert relative(infer(layer, inputs()), expected) < 0.01
    packed = weakref.ref(*copies(layer).values())
    del layer, memory
    gc.collect()
    assert packed() is None


def test_weights_in_one_storage_have_their_own_and_free_their_own(made):
    layers = torch.nn.ModuleList([make(), another(), make(True)])
    flat, start = torch.cat([layer.weight.data.view(-1) for layer in layers]), 0
    for layer in layers:
        layer.weight.data = flat[start : start + layer.weight.numel()].view(-1, 1)
        start += layer.weight.numel()
    for _ in range(3):
        for layer in layers:
            assert relative(infer(layer, inputs()), infer(never(layer), inputs())) < 0.01
    assert len(made) == len(copies(layers[0])) == 3
    del layers[1], layer
    gc.collect()
    assert len(copies(layers[0])) == 2 and all(map(holds_a_copy, layers))


def test_a_weight_in_two_modules_has_one(made):
    one, two = make(), another()
    two.weight = one.weight
    assert torch.equal(infer(one, inputs()), infer(two, inputs()))
    assert len(made) == 1
