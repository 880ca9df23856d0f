"""Each forward of a ``Linear4bit`` computes as if it were the first one."""

from __future__ import annotations

import itertools
import logging
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import patches
from patches.engine.gate import satisfied

bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-linear4bit-compute-dtype"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
records = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.47"), reason="0.46.1 does not obey the compute_dtype that the user gave"
)


def layer(compute=None, weight=torch.float32, bias=True):
    torch.manual_seed(0)
    return bnb.nn.Linear4bit(64, 96, bias=bias, compute_dtype=compute, quant_type="nf4").to(weight).to("cpu")


def run(made, dtype):
    """Output and input gradient for a fixed input in ``dtype``."""
    torch.manual_seed(1)
    x = torch.randn(3, 64).to(dtype).requires_grad_()
    y = made(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


def same(one, two):
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_float64_after_float32_is_right_with_and_without_a_gradient(rows, grad):
    made, x = layer(bias=False), torch.randn(rows, 64)
    weight = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state).double()
    with patches.applied(ID), torch.set_grad_enabled(grad):
        made(x)
        wide = x.double().requires_grad_(grad)
        got = made(wide)
        if grad:
            got.sum().backward()
            torch.testing.assert_close(wide.grad, weight.sum(0).expand(rows, -1), rtol=1e-5, atol=1e-5)
    assert got.dtype is torch.float64
    torch.testing.assert_close(got, x.double() @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_one_dtype_gives_bit_for_bit_what_it_gave(dtype, compute, training):
    made = layer(compute).train(training)
    before = run(made, dtype), run(made, dtype)
    made = layer(compute).train(training)
    with patches.applied(ID):
        after = run(made, dtype), run(made, dtype)
    assert same(before[0], after[0]) and same(before[1], after[1])


@pytest.mark.parametrize("first", DTYPES, ids=str)
@pytest.mark.parametrize("second", DTYPES, ids=str)
def test_every_call_is_as_good_as_a_first_one(first, second):
    expected = run(layer(bias=False), second)
    used = layer(bias=False)
    with patches.applied(ID):
        run(used, first)
        assert same(run(used, second), expected)


@records
@pytest.mark.parametrize("compute", DTYPES, ids=str)
def test_what_the_user_set_stays(compute):
    before, after = layer(compute, bias=False), layer(compute, bias=False)
    expected = [run(before, dtype) for dtype in DTYPES]
    with patches.applied(ID):
        results = [run(after, dtype) for dtype in DTYPES]
    assert all(map(same, results, expected))
    assert after.compute_dtype is compute


@pytest.mark.parametrize("compute", [None, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_writes_nothing(dtype, compute):
    """But for the note of 0.46.1 that the first input was of another dtype than was asked for."""
    made = layer(compute, bias=False)
    kept = dict(vars(made))
    noted = 0 if compute is None or satisfied("bitsandbytes>=0.47") else 1
    with patches.applied(ID):
        run(made, dtype)
    assert all(vars(made)[name] is value for name, value in kept.items()) and len(vars(made)) == len(kept) + noted


@pytest.mark.skipif(
    satisfied("bitsandbytes>=0.47"), reason="later releases obey the compute_dtype whatever comes first"
)
@pytest.mark.parametrize("order", list(itertools.permutations((*DTYPES, torch.float64))), ids=str)
@pytest.mark.parametrize("compute", DTYPES, ids=str)
def test_the_order_of_dtypes_decides_as_it_did_where_nothing_is_degraded(compute, order):
    """All but the wider inputs after a bfloat16 one, which was not asked for."""
    before, after = layer(compute, bias=False), layer(compute, bias=False)
    expected = [run(before, dtype) for dtype in order]
    with patches.applied(ID):
        results = [run(after, dtype) for dtype in order]
    degraded = order[0] is torch.bfloat16 and compute is not torch.bfloat16
    for dtype, was, now in zip(order, expected, results):
        if not degraded or dtype is torch.bfloat16:
            assert same(was, now)
        else:
            assert same(run(layer(compute, bias=False), dtype), now), "as if it were the first"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=str)
def test_first_call_compiles_to_one_graph_equal_to_eager(dtype, compute):
    bias = compute in (None, dtype)  # a bias of another dtype than the product is another defect
    expected = run(layer(compute, dtype, bias), dtype)
    made = layer(compute, dtype, bias)
    with patches.applied(ID, "bitsandbytes-matmul4bit-dtype-write"):
        torch.compiler.reset()
        step = torch.compile(lambda x: checkpoint(made, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
        assert same(run(step, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", [None, *DTYPES], ids=str)
def test_an_eager_call_after_the_compiled_one_compiles_nothing_again(dtype, compute):
    """A Trainer evaluates eagerly between compiled steps; 0.46.1 notes what came first."""
    made = layer(compute, dtype, bias=False)
    with patches.applied(ID, "bitsandbytes-matmul4bit-dtype-write"):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        step = torch.compile(made, fullgraph=True, backend="aot_eager")
        first, eager, second = run(step, dtype), run(made, dtype), run(step, dtype)
    assert same(first, eager) and same(first, second)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_warning_of_slow_float16_comes_as_before(caplog):
    def told():
        made, x = layer(), torch.randn(3, 64).half()
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            for _ in range(3):
                made(x)
        return len([w for w in caught if "float16" in str(w.message)]) + caplog.text.count("float16")

    before = told()
    with patches.applied(ID):
        assert told() == before
