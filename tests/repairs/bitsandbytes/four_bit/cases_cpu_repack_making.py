"""A packed copy is made where it pays: for few rows, and not again and again."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn import Linear4bit

import patches
from patches.quantized.four_bit.quant_states import canonical_state
from patches.repairs.bitsandbytes.four_bit.cpu_repack import PACKED_COPIES
from patches.operators import packed_copies

from .cpu_layers import (
    ID, NESTED, QUIET, another, copies, holds_a_copy, infer, inputs, made, make, never, patched, relative,
)  # fmt: skip

__all__ = ["made", "patched"]
pytestmark = QUIET
FEW = packed_copies._FEW
ENOUGH = packed_copies._ENOUGH_USES


@NESTED
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_packed_and_many_are_not(bias, nested, made):
    layer = make(nested, bias=bias)
    clean = never(layer)
    for shape in ((FEW + 1, 128), (2, FEW, 128), (128, 128)):
        x = inputs(*shape)
        assert torch.equal(infer(layer, x), infer(clean, x))
    assert not made
    for shape in ((FEW, 128), (1, 1, 128)):
        x = inputs(*shape)
        assert relative(infer(layer, x), infer(clean, x)) < 0.01
    assert len(made) == 1 and holds_a_copy(layer)
    x = inputs(FEW + 1, 128)
    assert torch.equal(infer(layer, x), infer(clean, x)), "not by the copy that is there either"


def test_large_weights_may_have_more_rows():
    rows = torch.empty(packed_copies._FEW_FOR_LARGE, 4096)
    assert packed_copies.has_few_rows(rows, (4096, 4096)) and not packed_copies.has_few_rows(rows, (4095, 4096))
    assert not packed_copies.has_few_rows(rows.new_empty(len(rows) + 1, 4096), (4096, 4096))


def test_what_a_copy_holds():
    """Memory is held twice while decoding: 4 bits a weight, and 16 for each block."""
    layer = make(shape=(1024, 512))
    infer(layer, inputs(1, 1024))
    (packed,) = copies(layer).values()
    assert packed.weight.nbytes == layer.weight.nbytes
    assert packed.scales.nbytes == 1024 * 512 // 64 * 2


# -- training and decoding in turn -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 128), (FEW + 1, 128)], ids=["decoding", "evaluating"])
def test_a_run_that_trains_in_between(shape, made):
    """The first training forward frees the copy; one that had to be made again stays. Batches are not packed at all."""
    layer = make()
    clean, held = never(layer), []
    for _ in range(6):
        assert relative(infer(layer.eval(), inputs(*shape)), infer(clean.eval(), inputs(*shape))) < 0.01
        results = []
        for model in (layer.train(), clean.train()):
            x = inputs(64, 128, grad=True)
            model(x).float().square().sum().backward()
            results.append(x.grad)
        assert torch.equal(*results)
        held.append(holds_a_copy(layer))
    if shape == (5, 128):
        assert held == [False, True, True, True, True, True] and len(made) == 2
    else:
        assert not any(held) and not made


def test_training_asks_nothing_of_weights_on_other_devices(monkeypatch):
    layer, asked = make().train(), []
    monkeypatch.setattr(packed_copies, "free_packed_copy", asked.append)
    canonical_state(layer, torch.compiler.is_compiling, PACKED_COPIES)
    assert len(asked) == 1
    layer.weight.quant_state.to("meta")
    canonical_state(layer, torch.compiler.is_compiling, PACKED_COPIES)
    assert len(asked) == 1


# -- weights that come and go ------------------------------------------------------------------------


def offloaded(kind: str, tmp_path) -> tuple[torch.nn.Module, torch.nn.Module]:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Sequential(make(shape=(128, 128)), make(True, shape=(128, 64)))
    clean = never(model)
    if kind == "disk":
        accelerate.disk_offload(model, str(tmp_path), torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, torch.device("cpu"))
    return model, clean


def test_weights_on_the_disk_are_never_packed(tmp_path, made):
    with patches.applied(ID, "bitsandbytes-params4bit-meta"):
        model, clean = offloaded("disk", tmp_path)
        for _ in range(20):
            assert torch.equal(infer(model, inputs()), infer(clean, inputs()))
    assert not made


def test_weights_in_memory_that_stays_are_packed_once(tmp_path, made):
    """accelerate puts the very tensors back that it took out."""
    with patches.applied(ID, "bitsandbytes-params4bit-meta"):
        model, clean = offloaded("cpu", tmp_path)
        for _ in range(20):
            assert relative(infer(model, inputs()), infer(clean, inputs())) < 0.02
    assert len(made) == 2


def test_new_memory_in_each_call_is_packed_once_at_most(made):
    """Who offloads by other means than accelerate's."""
    layer = make()
    clean, codes = never(layer), layer.weight.data
    for _ in range(50):
        layer.weight.data = codes.clone()
        assert relative(infer(layer, inputs()), infer(clean, inputs())) < 0.01
    assert len(made) == 1
    for _ in range(ENOUGH + 2):  # until it stays
        infer(layer, inputs())
    assert len(made) == 2 and holds_a_copy(layer)


def test_layers_streamed_through_one_buffer(made):
    layers = [make(), another()]
    expected = [infer(never(layer), inputs()) for layer in layers]
    host = [layer.weight.data.clone() for layer in layers]
    buffer = torch.empty_like(host[0])
    for layer in layers:
        layer.weight.data = buffer
    calls = 300
    for _ in range(calls):
        for layer, codes, true in zip(layers, host, expected):
            buffer.copy_(codes)
            assert relative(infer(layer, inputs()), true) < 0.01
    assert len(made) <= 2 * 6, "at intervals of 8, 16, 32, 64, 128"


def test_other_weights_that_are_used_are_packed_at_once(made):
    layer = make()
    for pattern in (0, 17, 34, 51):
        with torch.no_grad():
            layer.weight.bitwise_xor_(pattern)
        for _ in range(ENOUGH + 1):
            assert relative(infer(layer, inputs()), infer(never(layer), inputs())) < 0.01
            assert holds_a_copy(layer)
    assert len(made) == 4


def test_a_layer_that_was_never_quantized_raises_as_it_does_elsewhere():
    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16).eval()
    with pytest.raises(AssertionError):
        infer(layer, inputs())
