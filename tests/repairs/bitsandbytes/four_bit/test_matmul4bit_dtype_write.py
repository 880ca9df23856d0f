"""``matmul_4bit`` on a CPU computes in its input's dtype and leaves the weight's state alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import patches
from patches.engine.gate import satisfied

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.skipif(not satisfied("bitsandbytes>=0.49,<0.50"), reason="only 0.49 writes the dtype")

ID = "bitsandbytes-matmul4bit-dtype-write"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [pytest.param(w, x, id=f"{w}-{x}".replace("torch.", "")) for w, x in itertools.product(DTYPES, DTYPES)]


def layer(weight: torch.dtype, compute: torch.dtype, nested: bool = True) -> bnb.nn.Linear4bit:
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(128, 96, bias=False, compute_dtype=compute, compress_statistics=nested, quant_type="nf4")
    return made.to(weight).to("cpu")


def product(multiply, state, codes, x):
    """Output and input gradient of ``multiply`` on a state of its own."""
    x = x.clone().requires_grad_()
    y = multiply(x, codes.t(), quant_state=copy.deepcopy(state))
    y.float().square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("weight, dtype", PAIRS)
def test_results_bitwise_as_before(weight, dtype, nested):
    torch.manual_seed(0)
    codes, state = bnb.functional.quantize_4bit(
        torch.randn(96, 128).to(weight), quant_type="nf4", compress_statistics=nested
    )
    x = torch.randn(5, 128).to(dtype)
    before = product(bnb.matmul_4bit, state, codes, x)
    with patches.applied(ID):
        after = product(bnb.matmul_4bit, state, codes, x)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("weight, dtype", PAIRS)
def test_the_state_stays_as_it_was_and_so_does_what_is_saved(weight, dtype):
    made = layer(weight, dtype)
    saved = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    kept = dict(vars(made.weight.quant_state))
    with patches.applied(ID):
        for training in (True, False):
            made.train(training)(torch.randn(2, 128, dtype=dtype))
    assert all(vars(made.weight.quant_state)[name] is value for name, value in kept.items())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize("weight, dtype", PAIRS)
def test_first_call_compiles_to_one_graph_equal_to_eager(weight, dtype):
    x = torch.randn(3, 128, dtype=dtype)
    eager = x.clone().requires_grad_()
    y = layer(weight, dtype)(eager)
    y.sum().backward()
    with patches.applied(ID):
        torch.compiler.reset()
        made = layer(weight, dtype)
        step = torch.compile(lambda x: checkpoint(made, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        out = step(leaf)
        out.sum().backward()
    assert torch.equal(out, y) and torch.equal(leaf.grad, eager.grad)
    assert made.weight.quant_state.dtype is weight


def test_every_alias_sees_it():
    kept = bnb.matmul_4bit
    made = layer(torch.float16, torch.bfloat16)
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    with patches.applied(ID):
        assert bnb.matmul_4bit is bnb.autograd._functions.matmul_4bit is kept
        kept(x, made.weight.t(), quant_state=made.weight.quant_state)
    assert made.weight.quant_state.dtype is torch.float16
    kept(x, made.weight.t(), quant_state=made.weight.quant_state)
    assert made.weight.quant_state.dtype is torch.bfloat16, "the test does not reach the defect"


def test_a_repacked_weight_keeps_its_state():
    """A state as the AVX512-BF16 repack leaves it goes to the product unchanged, whatever its dtype says."""
    from patches.repairs.bitsandbytes.four_bit.matmul4bit_dtype_write import in_dtype

    state = layer(torch.bfloat16, torch.bfloat16).weight.quant_state
    state.packing_format_for_cpu = True
    assert in_dtype(state, torch.float16) is state
    state.packing_format_for_cpu = False
    private = in_dtype(state, torch.float16)
    assert private is not state and private.absmax is state.absmax and private.state2 is state.state2
