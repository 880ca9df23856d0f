"""What the backward of a 4-bit product needs is saved where autograd can see it."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

import patches

ID = "bitsandbytes-matmul4bit-saved-tensors"
OLDEST = Version(bitsandbytes.__version__) < Version("0.47")
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])


def make(device: str, nested: bool, seed: int = 0, **options) -> Linear4bit:
    torch.manual_seed(seed)
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", **options}
    return Linear4bit(64, 128, compress_statistics=nested, **options).to(device)


def inputs(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 64, dtype=dtype, device=device, requires_grad=True)


def run(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and gradient of the input."""
    x.grad = None
    out = layer(x)
    out.float().square().sum().backward()
    return out, x.grad


def tensors_of(layer: Linear4bit) -> list[torch.Tensor]:
    """The packed weight and every tensor of its statistics that dequantizing reads."""
    state = layer.weight.quant_state
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [layer.weight, state.absmax, state.code, *nested]


@NESTED
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=["uint8", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits(dtype, storage, nested, device):
    if OLDEST and device == "cpu" and storage != torch.uint8:
        pytest.skip("before 0.47 a CPU dequantizes uint8 storage only")
    layer = make(device, nested, compute_dtype=dtype, quant_storage=storage)
    x = inputs(device, dtype)
    unpatched = run(layer, x)
    with patches.applied(ID):
        patched = run(layer, x)
    assert all(map(torch.equal, patched, unpatched))


@NESTED
def test_hooks_see_weight_and_statistics(nested, device):
    layer, x, seen = make(device, nested), inputs(device), set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.add(tensor.data_ptr())
        return tensor

    with patches.applied(ID), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert {t.data_ptr() for t in tensors_of(layer)} <= seen


@NESTED
def test_backward_reads_what_the_hooks_give_back(nested, device):
    """As after ``save_on_cpu``, or after offloading moved the layer's own tensors away."""
    layer, x = make(device, nested), inputs(device)
    expected = run(layer, x)
    with patches.applied(ID):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            out = layer(x)
        for tensor in tensors_of(layer):
            tensor.data.zero_()
        assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected[1])


@NESTED
@pytest.mark.parametrize("which", ["weight", "absmax"])
def test_a_reused_buffer_raises(which, nested, device):
    layer, other, x = make(device, nested), make(device, nested, seed=2), inputs(device)
    with patches.applied(ID):
        out = layer(x).sum()
        with torch.no_grad():
            if which == "weight":
                layer.weight.copy_(other.weight)
            else:
                layer.weight.quant_state.absmax.copy_(other.weight.quant_state.absmax)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_only_the_bias_learns(device):
    layer, x = make(device, nested=True), inputs(device).detach()
    with patches.applied(ID):
        layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((128,), 3.0, device=device))


def test_empty_input(device):
    layer = make(device, nested=True)
    x = torch.empty(0, 64, device=device, requires_grad=True)
    with patches.applied(ID):
        out, gradient = run(layer, x)
    assert out.shape == (0, 128) and gradient.shape == (0, 64)


def test_weights_made_in_inference_mode_still_train(device):
    """torch refuses to save such tensors; before, they just worked."""
    with torch.inference_mode():
        layer = make(device, nested=True)
    layer.bias = None
    x = inputs(device)
    expected = run(layer, x)
    with patches.applied(ID):
        assert all(map(torch.equal, run(layer, x), expected))


class Checkpointed(torch.nn.Module):
    """A layer in a checkpointed block; ``reentrant`` None for no checkpointing."""

    def __init__(self, layer: Linear4bit, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(torch.sin(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(reentrant, device):
    layer, x = make(device, nested=True), inputs(device)
    expected = run(Checkpointed(layer, None), x)
    with patches.applied(ID):
        assert all(map(torch.equal, run(Checkpointed(layer, reentrant), x), expected))


@NESTED
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_compiles_in_one_graph(warm, reentrant, nested, device):
    if OLDEST and reentrant is not None and not warm:
        pytest.skip("before 0.47 the first forward settles the compute dtype, which checkpointing cannot trace")
    layer, x = make(device, nested, bias=False), inputs(device)
    expected = run(Checkpointed(layer, reentrant), x)
    layer = make(device, nested, bias=False)
    model = Checkpointed(layer, reentrant)
    with patches.applied(ID):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if warm:
            run(model, x)
        compiled = run(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(map(torch.equal, compiled, expected))


def test_a_state_without_a_code_table():
    """What ``bitsandbytes-matmul4bit-aot-cache`` hands on, when the graph is run without AOT autograd."""
    layer, x = make("cpu", nested=False), inputs("cpu")
    layer(x)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with patches.applied(ID, "bitsandbytes-matmul4bit-aot-cache"):
        torch.compiler.reset()
        (gradient,) = torch.autograd.grad(torch.compile(layer, backend="eager")(x).sum(), x)
    assert torch.equal(gradient, expected)
