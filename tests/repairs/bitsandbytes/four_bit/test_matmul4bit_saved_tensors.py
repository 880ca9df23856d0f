"""The backward of a 4-bit product uses the weight of its forward, or raises; only what is resident is kept by reference."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

import patches
from patches.repairs.bitsandbytes.four_bit.matmul4bit_saved_tensors import recall
from tests.repairs.bitsandbytes.offloading import offloaded

pytestmark = pytest.mark.one_in(2)

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
def test_what_is_as_it_was_is_read_where_it_is(nested, device):
    """No state is made anew for a backward that reads what its forward read."""
    with patches.applied(ID):
        node = make(device, nested)(inputs(device)).grad_fn
        assert recall(node) is node


def operands_of(layer: Linear4bit) -> list[torch.Tensor]:
    """The packed weight and every tensor of its statistics that dequantizing reads."""
    state = layer.weight.quant_state
    return [
        layer.weight,
        state.absmax,
        *([state.offset, state.state2.absmax, state.state2.code] if state.nested else []),
    ]


def packed(call, x: torch.Tensor) -> set[int]:
    """The addresses of what saved-tensor hooks see of a forward."""
    seen: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(t.data_ptr()) or t, lambda t: t):
        call(x)
    return seen


@NESTED
def test_hooks_carry_no_resident_weight(nested, device):
    layer, x = make(device, nested), inputs(device)
    assert not packed(layer, x)
    with patches.applied(ID):
        assert not packed(layer, x)


@NESTED
def test_hooks_see_a_weight_that_is_no_parameter(nested, device):
    layer, x = make(device, nested), inputs(device)
    expected = run(layer, x)[1]
    weight, state = layer.weight.data.clone(), layer.weight.quant_state

    def call(x: torch.Tensor) -> torch.Tensor:
        return bitsandbytes.matmul_4bit(x, weight.t(), quant_state=state, bias=layer.bias)

    with patches.applied(ID):
        assert {t.data_ptr() for t in [weight, *operands_of(layer)[1:]]} <= packed(call, x)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            out = call(x)
        for tensor in (weight, *operands_of(layer)[1:]):
            tensor.data.zero_()
        assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected), "what the hooks gave back"


@NESTED
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_offloaded_weights_are_not_held_until_backward(reentrant, nested, tmp_path):
    """As by nn.Linear: without checkpointing autograd holds them, with it they are brought again."""
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": nested}
    with patches.applied():
        plain, *_ = offloaded(torch.nn.Linear, reentrant, tmp_path / "plain")
        held, gradient, expected = offloaded(
            lambda *a, **k: Linear4bit(*a, **k, **options), reentrant, tmp_path / "4bit"
        )
    assert torch.equal(gradient, expected)
    assert held == plain == (4 if reentrant is None else 0)


@NESTED
def test_statistics_that_were_replaced_since(nested, device):
    """As ``QuantState.to`` does, in place, when the weight is moved: backward needs those of forward."""
    layer, x = make(device, nested), inputs(device)
    expected = run(layer, x)[1]
    with patches.applied(ID):
        out = layer(x)
        state = layer.weight.quant_state
        state.absmax = torch.zeros_like(state.absmax)
        if nested:
            state.state2.absmax = torch.zeros_like(state.state2.absmax)
        assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], expected)


def test_a_second_backward_goes_on_working(device):
    """Without the patch it does, for nothing is freed; a layer that learns nothing has nothing to save."""
    layer, x = make(device, nested=True, bias=False), inputs(device)
    with patches.applied(ID):
        out = layer(x)
        out.sum().backward()
        out.sum().backward()
    assert x.grad.isfinite().all()


@NESTED
def test_a_backward_after_apply_or_revert(nested, device):
    layer, x = make(device, nested), inputs(device)
    expected = run(layer, x)[1]
    before = layer(x)
    with patches.applied(ID):
        assert torch.equal(torch.autograd.grad(before.square().sum(), x)[0], expected)
        since = layer(x)
        saved = bitsandbytes.matmul_4bit(x, layer.weight.data.t(), quant_state=layer.weight.quant_state)
    assert torch.equal(torch.autograd.grad(since.square().sum(), x)[0], expected)
    with pytest.raises(RuntimeError, match=f"{ID}.*run forward again"):
        saved.sum().backward()


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
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.* version [12]; expected version [01]"
        ):
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


@pytest.mark.parametrize("which", ["layer", "statistics", "no parameter"])
def test_tensors_made_in_inference_mode_still_train(which, device):
    """torch refuses to save such tensors; before, they just worked."""
    with torch.inference_mode(which != "statistics"):
        layer = make(device, nested=True, bias=False)
    state = layer.weight.quant_state
    if which == "statistics":
        with torch.inference_mode():
            state.absmax = state.absmax.clone()
    weight = layer.weight.data.t()
    call = layer if which != "no parameter" else lambda x: bitsandbytes.matmul_4bit(x, weight, quant_state=state)
    x = inputs(device)
    for reentrant in (None, False):
        model = Checkpointed(call, reentrant)
        expected = run(model, x)
        with patches.applied(ID):
            assert all(map(torch.equal, run(model, x), expected))


class Checkpointed(torch.nn.Module):
    """A layer in a checkpointed block; ``reentrant`` None for no checkpointing."""

    def __init__(self, layer, reentrant: bool | None) -> None:
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


@NESTED
def test_a_compiled_layer_that_is_offloaded_is_one_graph(nested):
    """Its hook brings a new weight for each forward: what Dynamo traces must not depend on which."""
    hooks = pytest.importorskip("accelerate.hooks")
    layer, x = make("cpu", nested, bias=False), inputs("cpu")
    expected = run(layer, x)
    with patches.applied():
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(torch.device("cpu"), offload=True))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(layer, backend="aot_eager")
        assert all(torch.equal(got, right) for _ in range(3) for got, right in zip(run(compiled, x), expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_state_without_a_code_table():
    """What ``bitsandbytes-matmul4bit-aot-cache`` hands on, when the graph is run without AOT autograd."""
    layer, x = make("cpu", nested=False), inputs("cpu")
    layer(x)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    with patches.applied(ID, "bitsandbytes-matmul4bit-aot-cache"):
        torch.compiler.reset()
        (gradient,) = torch.autograd.grad(torch.compile(layer, backend="eager")(x).sum(), x)
    assert torch.equal(gradient, expected)
