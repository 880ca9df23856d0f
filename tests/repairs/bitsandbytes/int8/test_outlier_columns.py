"""The INT8 operator against MatMul8bitLt: the same bits, forward and backward, in one graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import patches
from patches.engine.gate import satisfied
from patches.repairs.reproducers.graphs import count_graphs

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.one_in(3)
functions = bnb.autograd._functions

ID = "bitsandbytes-int8-outlier-columns"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


COLD = "bitsandbytes-int8-cold-state"
"""Before 2.13 torch refuses what this layer writes into its state while a checkpoint is traced."""


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Training on a CPU takes MatMul8bitFp, which has no outlier columns; a GPU has no such way around."""
    if device != "cpu" or not hasattr(functions, "MatMul8bitFp"):
        return
    if satisfied("torch<2.13"):
        pytest.skip("before torch 2.13 what stands in the place of MatMul8bitFp is not recognized; a GPU has it not")
    monkeypatch.setattr(functions, "MatMul8bitFp", functions.MatMul8bitLt)


def layer_of(dtype: torch.dtype, bias: bool, device: str, threshold: float = 6.0) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32, bias=bias, has_fp16_weights=False, threshold=threshold)
    return layer.to(dtype).to(device)


def input_of(dtype: torch.dtype, device: str, outliers: bool = True) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64)
    if outliers:
        x[..., 3] *= 20
        x[..., 40] -= 30
    else:
        x = x.clamp(-5, 5)
    return x.to(dtype).to(device)


def step(call, layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and every gradient of one call."""
    leaves = [x.detach().clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    for leaf in leaves:
        leaf.grad = None
    y = call(leaves[0])
    y.float().square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("outliers", [True, False], ids=["outliers", "no-outliers"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_graph_of_the_same_bits(as_on_a_gpu, device, dtype, bias, outliers):
    layer, x = layer_of(dtype, bias, device), input_of(dtype, device, outliers)
    layer(x)  # casts the bias to the dtype of the input for good
    expected = step(layer, layer, x)
    assert (layer.state.idx.numel() > 0) is outliers
    with patches.applied(ID):
        assert all(map(torch.equal, step(layer, layer, x), expected)), "eager changed"
        assert count_graphs(layer, x) == 1
        # Inductor sums a bias gradient in float32 before it rounds, quantized or not.
        for backend in ("aot_eager",) if bias or dtype is torch.float16 else ("aot_eager", "inductor"):
            torch.compiler.reset()
            got = step(torch.compile(layer, fullgraph=True, backend=backend), layer, x)
            assert len(got) == len(expected) == 2 + bias
            assert all(map(torch.equal, got, expected)), backend


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_inputs_of_five_dimensions_too(as_on_a_gpu, device, bias):
    """Where bitsandbytes-int8-input-dimensions lets eager take them: Cosmos and other image models have such layers."""
    layer, x = layer_of(torch.bfloat16, bias, device), input_of(torch.bfloat16, device)[None, None]
    with patches.applied("bitsandbytes-int8-input-dimensions"):
        layer(x)
        expected = step(layer, layer, x)
        with patches.applied(ID):
            assert count_graphs(layer, x) == 1
            got = step(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, x)
            assert all(map(torch.equal, got, expected))


def test_eval_takes_the_operator_on_every_device(device):
    layer, x = layer_of(torch.bfloat16, True, device).eval(), input_of(torch.bfloat16, device)
    with torch.no_grad():
        expected = layer(x)
        assert count_graphs(layer, x) > 1
        with patches.applied(ID):
            assert count_graphs(layer, x) == 1
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), expected)
            # Other data has other outlier columns, or none, in the same graph.
            for other in (x.roll(7, -1), x.clamp(-1, 1), x[0], x[:, :0]):
                assert torch.equal(compiled(other), layer(other))


def test_the_number_of_outlier_columns_is_no_reason_to_compile_again(device):
    layer = layer_of(torch.float16, False, device).eval()
    inputs = [input_of(torch.float16, device).roll(k, -1) for k in range(3)]
    inputs += [input_of(torch.float16, device, outliers=False)]
    layer(inputs[0])
    with patches.applied(ID), torch.no_grad():
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for x in inputs:
            assert torch.equal(compiled(x), layer(x))
        assert counter.frame_count == 1


def test_checkpointing_recomputes_the_operator(as_on_a_gpu, device):
    from torch.utils.checkpoint import checkpoint

    layer, x = layer_of(torch.bfloat16, False, device), input_of(torch.bfloat16, device)
    layer(x)
    expected = step(layer, layer, x)
    with patches.applied(ID, *([COLD] if satisfied("torch<2.13") else [])):
        for reentrant in (False, True):
            torch.compiler.reset()

            @torch.compile(fullgraph=True, backend="aot_eager")
            def call(x, reentrant=reentrant):
                return checkpoint(layer, x, use_reentrant=reentrant)

            assert all(map(torch.equal, step(call, layer, x), expected))


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(device, dtype, grad):
    from patches.operators import int8_linear

    layer = layer_of(dtype, True, device)
    weight = layer.weight
    bias = layer.bias.detach().to(dtype).requires_grad_(grad)
    for x in (input_of(dtype, device), input_of(dtype, device, outliers=False)[0]):
        arguments = (x.requires_grad_(grad), weight.CB, weight.SCB, bias, 6.0)
        torch.library.opcheck(int8_linear.OPERATOR, arguments)


def test_what_the_operator_cannot_stand_for_is_left_alone(device):
    """Without a threshold, and with a weight that is still fp16, the library's function is called."""
    from patches.repairs.bitsandbytes.int8.outlier_columns import _fits

    x = input_of(torch.float16, device)
    settled = layer_of(torch.float16, False, device)
    settled(x)
    assert _fits(x, settled.state)
    assert not _fits(x[0, 0], settled.state)
    plain = layer_of(torch.float16, False, device, threshold=0.0)
    plain(x)
    assert not _fits(x, plain.state)
    assert not _fits(x, bnb.MatmulLtState())
