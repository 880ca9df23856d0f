"""torch.compile and torch.export on CPUs with AVX512-BF16: the packed kernel in graphs, nothing of ours in files."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked

import patches
from tests import releases

from .cpu_layers import (
    NESTED, QUIET, SMALL, holds_a_copy, infer, inputs, made, make, never, patched, relative, same_state,
)  # fmt: skip

__all__ = ["made", "patched"]
pytestmark = QUIET
ROWS = (4, 7, 1, 5, 128, 64, 2)


class Counting:
    """A backend that counts the graphs it gets."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@NESTED
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_graph_computes_what_eager_does_and_holds_no_copy_of_its_own(warm, nested):
    layer, x = make(nested, bias=True), inputs()
    expected = infer(copy.deepcopy(layer), x)
    if warm:
        infer(layer, x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(10):
        assert torch.equal(infer(compiled, x), expected)
    assert holds_a_copy(layer)
    assert same_state(layer, never(layer))
    with torch.no_grad():
        layer.weight.copy_(torch.flip(layer.weight, [0]))
    assert torch.equal(infer(compiled, x), infer(copy.deepcopy(layer), x))
    assert not torch.equal(infer(compiled, x), expected)
    layer.weight.data.copy_(torch.flip(layer.weight.data, [0]))  # counted by nobody
    assert relative(infer(compiled, x), expected) < 0.01


@NESTED
@pytest.mark.parametrize("bias", [False, True])
def test_one_graph_for_few_rows_and_many(bias, nested, made):
    layer = make(nested, bias=bias)
    eager, backend = copy.deepcopy(layer), Counting()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for rows in ROWS:
        assert torch.equal(infer(compiled, inputs(rows, 128)), infer(eager, inputs(rows, 128)))
    assert backend.graphs <= 2, "one row may have a graph of its own"
    assert len(made) == 2, "one for each of the two layers"


def test_rows_that_the_compiler_may_not_ask_for():
    layer = make(True, bias=True)
    eager, backend = copy.deepcopy(layer), Counting()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for rows in (0, *ROWS):
        x = inputs(rows, 128)
        mark_unbacked(x, 0)
        assert torch.equal(infer(compiled, x), infer(eager, inputs(rows, 128)))
    assert backend.graphs == 1


def test_a_width_that_is_no_multiple_of_the_block_size():
    layer, x = make(shape=(96, 64), bias=True), inputs(3, 96)
    expected = infer(layer, x)
    assert torch.equal(infer(torch.compile(layer, backend="aot_eager", fullgraph=True), x), expected)


# -- exported programs -------------------------------------------------------------------------------

LOADED = """
import sys
import torch
import bitsandbytes
assert not any(name.startswith("bnb_patches") for name in torch._C._dispatch_get_all_op_names())
for name, x, expected in torch.load(sys.argv[1] + "/expected.pt"):
    program = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()
    with torch.no_grad():
        assert torch.equal(program(x), expected), (name, (program(x) - expected).abs().max())
    print("right")
"""


@releases.of_the_newest
def test_exported_programs_are_right_without_the_plugin(forked, tmp_path):
    expected = []
    for shape, nested, warm in itertools.product((SMALL, (96, 64)), (False, True), (False, True)):
        layer, x, name = make(nested, shape, bias=True), inputs(3, shape[0]), f"program-{len(expected)}"
        if warm:
            infer(layer, x)
        out = torch.nn.functional.linear(x, true_weight(layer), layer.bias.detach())
        rows = torch.export.Dim("rows", min=2, max=64)
        with torch.no_grad():
            program = torch.export.export(layer, (x,), dynamic_shapes=((rows, None),), strict=True)
        operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert operators and not any("bnb_patches" in name for name in operators)
        assert torch.equal(infer(program.module(), x), out)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        expected.append((name, x, out))
    torch.save(expected, tmp_path / "expected.pt")
    patches.revert()
    assert forked(LOADED, str(tmp_path)).split() == ["right"] * len(expected)


def true_weight(layer: torch.nn.Module) -> torch.Tensor:
    """By the kernel for one row, which is right on every processor."""
    from bitsandbytes.functional import dequantize_blockwise

    state = layer.weight.quant_state
    absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    count = state.shape[0] * state.shape[1]
    flat = torch.ops.bitsandbytes.dequantize_4bit(
        layer.weight.data, absmax, state.blocksize, state.quant_type, [count], torch.bfloat16
    )
    return flat.view(state.shape)


def test_what_cannot_be_exported_says_so():
    """Not strict, torch refuses every 4-bit layer, on any processor and without the plugin."""
    layer, x = make(), inputs(3, 128)
    for model in (layer, never(layer)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="Params4bit"):
            torch.export.export(model, (x,), strict=False)
