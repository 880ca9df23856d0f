"""Quantized experts as a tensor: views, products, writes, and what it does where all experts are needed at once."""

from __future__ import annotations

import copy
import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from patches.engine.gate import satisfied  # noqa: E402
from patches.experts import dense_operations  # noqa: E402
from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts  # noqa: E402
from patches.experts.tensor import QuantizedExperts, as_parameter  # noqa: E402


@pytest.fixture(
    params=[QuantizationConfig("nf4", True, torch.uint8), QuantizationConfig("int8", False, torch.int8)],
    ids=lambda how: how.quant_type,
)
def experts(request):
    """In INT8 those whose products dequantize; test_int8.py has those that LLM.int8 multiplies by."""
    dense_operations.COUNTS.clear()
    torch.manual_seed(0)
    return as_parameter(split_and_quantize_experts(torch.randn(4, 32, 64), 2, request.param))


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[2],
        lambda w: w[torch.tensor(3)],
        lambda w: w[-1],
        lambda w: w[torch.tensor([3, 0, 3])],
        lambda w: w[1:3],
        lambda w: w[1:3][1],
        lambda w: w[torch.tensor([3, -4])][1],
        lambda w: w.transpose(1, 2)[1],
        lambda w: w.mT,
        lambda w: w[1].t(),
        lambda w: w.permute(0, 2, 1),
        lambda w: w.unbind(0)[3],
        lambda w: w.split(2)[1],
        lambda w: w.detach().clone(),
        lambda w: w.expand(4, 32, 64),
    ],
)
def test_views(experts, view):
    got = view(experts)
    expected = view(experts.dequantize())
    assert isinstance(got, QuantizedExperts) and got.shape == expected.shape and got.stride() == expected.stride()
    assert torch.equal(got.dequantize(), expected) and not dense_operations.COUNTS


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.nn.functional.linear(x, w[1]),
        lambda x, w: torch.nn.functional.linear(x[None], w[1]),
        lambda x, w: torch.nn.functional.linear(x, w[1], torch.ones(32)),
        lambda x, w: x[:, :32] @ w[1],
        lambda x, w: w[1] @ x.t(),
        lambda x, w: torch.bmm(x.expand(4, 6, 64), w.transpose(1, 2)),
        lambda x, w: torch.bmm(w[torch.tensor([3, 0, 3, 1, 1, 2])], x.unsqueeze(-1)),
        lambda x, w: torch.bmm(x.unsqueeze(1), w.mT[torch.tensor([3, 0, 3, 1, 1, 2])]),
    ],
)
def test_products_and_their_gradients(experts, product):
    results = []
    for weight in (experts, experts.dequantize()):
        torch.manual_seed(1)
        x = torch.randn(6, 64, requires_grad=True)
        y = product(x, weight)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not dense_operations.COUNTS


def test_nothing_dequantized_is_saved_for_backward(experts):
    saved = []
    x = torch.randn(6, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.nn.functional.linear(x, experts[1])
    assert [isinstance(t, QuantizedExperts) for t in saved] == [True]


def test_all_at_once_is_counted_and_said_once(experts, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("bnb_patches"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="bnb_patches"):
        for _ in range(2):
            assert torch.equal(experts.sum(0), experts.dequantize().sum(0))
    assert dense_operations.COUNTS == {"aten.sum.dim_IntList": 2}
    (record,) = caplog.records
    assert "aten.sum.dim_IntList needs all experts at once: while it runs, 4 experts ((4, 32" in record.getMessage()


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.zero_(),
        lambda w: w[1].add_(1),
        lambda w: torch.neg(torch.ones(4, 32, 64), out=w),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch._foreach_copy_([w[0]], [torch.ones(32, 64)]),
    ],
)
def test_writes_are_refused(experts, write):
    before = experts.dequantize()
    with torch.no_grad(), pytest.raises(RuntimeError, match="would write into quantized experts"):
        write(experts)
    assert torch.equal(experts.dequantize(), before)


def test_floating_point_is_refused(experts):
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected quantized experts"):
        experts.copy_(torch.ones(4, 32, 64))
    with pytest.raises(RuntimeError, match=r"cannot take Tensor \(4, 32, 64\) as .data"):
        experts.data = torch.ones(4, 32, 64)


def test_gradients_are_refused(experts):
    with pytest.raises(RuntimeError, match="cannot require gradients"):
        experts.requires_grad_()
    with pytest.raises(RuntimeError, match="cannot require gradients"):
        experts.requires_grad = True
    assert experts.requires_grad_(False) is experts


def test_data(experts):
    other = copy.deepcopy(experts)
    other.packed.parts[0].codes.zero_()
    experts.data = other.data.to(torch.bfloat16)
    assert experts.dtype == torch.bfloat16 and torch.equal(experts.dequantize(), other.dequantize().bfloat16())


def test_loaded_between_forward_and_backward(experts):
    x = torch.randn(6, 64, requires_grad=True)
    y = torch.nn.functional.linear(x, experts[1])
    with torch.no_grad():
        experts.copy_(copy.deepcopy(experts))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_meta_and_back(experts):
    module = torch.nn.Module()
    module.experts, values = experts, experts.dequantize()
    state = copy.deepcopy(module.state_dict())
    module.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert isinstance(module.experts, QuantizedExperts) and torch.equal(module.experts.dequantize(), values)


def test_in_inference_mode(experts):
    x = torch.randn(6, 64)
    expected = torch.nn.functional.linear(x, experts[1])
    with torch.inference_mode():
        assert torch.equal(torch.nn.functional.linear(x, experts[torch.tensor(1)]), expected)
        torch.testing.assert_close((experts.mT[1].t() @ x.t()).t(), expected, rtol=1e-5, atol=1e-5)
        made = as_parameter(experts.packed)
        assert torch.equal(torch.nn.functional.linear(x, made[1]), expected)
    assert not dense_operations.COUNTS


def test_views_in_floating_point_in_inference_mode(experts):
    values = experts.dequantize()
    with torch.inference_mode():
        assert torch.equal(experts[:, 1], values[:, 1]) and torch.equal(experts[0, 1], values[0, 1])
        assert torch.equal(experts.view(-1), values.view(-1)) and torch.equal(torch.tensor(experts), values)


def test_read_by_another_library(experts):
    """DLPack gives an address; that of the tensor holds nothing: reading it ended the process."""
    values = experts.dequantize()
    assert torch.equal(torch.from_dlpack(experts), values) and torch.equal(torch.from_dlpack(experts[1]), values[1])


def test_in_float16_where_autocast_is_for_bfloat16(experts):
    values = experts.half().dequantize()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts.half()[1] + 0, values[1]) and torch.equal(experts.half() + 0, values)


def test_shared_with_other_processes(experts):
    values = experts.dequantize()
    module = torch.nn.Module()
    module.experts = experts
    assert not experts.is_shared()
    module.share_memory()
    assert experts.is_shared() and all(tensor.is_shared() for tensor in experts.packed.tensors().values())
    assert torch.equal(experts.dequantize(), values)


@pytest.mark.parametrize("columns", [64, 60], ids=["whole blocks", "a block that ends early"])
@pytest.mark.parametrize("double", [False, True])
def test_two_matrices_of_an_expert_are_what_each_stands_for(double, columns):
    from bitsandbytes.functional import dequantize_4bit

    if columns == 60 and satisfied("bitsandbytes<0.48"):
        pytest.skip("bitsandbytes before 0.48 quantizes whole blocks only")
    held = split_and_quantize_experts(torch.randn(3, 10, columns), 2, QuantizationConfig("nf4", double, torch.uint8))
    expected = torch.cat([dequantize_4bit(codes, state) for codes, state in held.matrices(2)])
    assert torch.equal(held.dequantize(2), expected)
