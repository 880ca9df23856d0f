"""The device itself: what the other cases rely on."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

from tests.device import watch
from tests.device.layers import KINDS

pytestmark = pytest.mark.usefixtures("only_simulated")


def test_it_computes_what_the_cpu_computes(device):
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    for function in (torch.linalg.inv, lambda t: t @ t.T, lambda t: t.softmax(-1), lambda t: t[t > 0].cumsum(0)):
        assert torch.equal(function(x.to(device)).cpu(), function(x))


@pytest.mark.parametrize("function", [torch.add, torch.mm, lambda a, b: torch.cat([a, b])], ids=["add", "mm", "cat"])
def test_it_refuses_operands_of_two_devices(function, device, other):
    a = torch.ones(4, 4, device=device)
    for b in (torch.ones(4, 4), torch.ones(4, 4, device=other)):
        for pair in ((a, b), (b, a)):
            with pytest.raises(RuntimeError, match="on the same device"):
                function(*pair)
    assert (a + torch.tensor(1.0)).sum() == 32, "a number of the host is none"


def test_operators_of_bitsandbytes_refuse_them_too(device):
    codes, absmax = torch.ops.bitsandbytes.quantize_4bit(torch.ones(64, 64, device=device), 64, "nf4", torch.uint8)
    assert codes.device == absmax.device == torch.device(device)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ops.bitsandbytes.dequantize_4bit(codes, absmax.cpu(), 64, "nf4", (64, 64), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_quantize_to_what_they_are_on_the_cpu(kind, device):
    torch.manual_seed(0)
    layer = KINDS[kind](64, 32).requires_grad_(False)
    x, weight = torch.randn(4, 64), layer.weight.detach().clone()
    layer = layer.to(device)
    assert layer.weight.dtype in (torch.int8, torch.uint8)
    expected = torch.nn.functional.linear(x, weight, layer.bias.cpu())
    error = (layer(x.to(device)).cpu() - expected).norm() / expected.norm()
    assert error < (0.02 if "int8" in kind else 0.15)


def test_what_it_does_is_told(device, other):
    x = torch.randn(16, device=device)
    with watch.watch() as seen:
        y = x + x
        assert y.sum().item() == 2 * x.sum().item()
        y.cpu()
        y.to(other)
        torch.ones(4).to(device)
    assert seen.kernels == ["aten::add.out", "aten::sum.IntList_out", "aten::sum.IntList_out"]
    assert seen.copies == [("device to host", 64), ("device to device", 64), ("host to device", 16)]
    assert seen.waits == ["item", "item", "copy device to host", "copy host to device"]
    assert seen.moved("device to host") == 64
    with watch.watch() as nothing:
        x.view(4, 4), x.detach(), torch.empty(3, device=device)
    assert nothing.log == []


def test_a_mask_as_an_index_makes_the_host_wait(device):
    x = torch.randn(16, device=device)
    mask = x > 0
    with watch.watch() as seen:
        x[mask], x.nonzero(), x.index_put_((mask,), x[:1]), torch.equal(x, x)
    assert seen.waits == ["aten::nonzero", "aten::nonzero", "aten::_index_put_impl_", "equal"]


def test_one_operator_of_bitsandbytes_is_one_kernel(device):
    weight = KINDS["nf4"](64, 64).to(device).weight
    with watch.watch() as seen:
        bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert seen.kernels == ["bitsandbytes::dequantize_4bit"]


def test_the_two_devices_are_apart(device, other):
    before = watch.held(0), watch.held(1)
    x = torch.empty(100, device=other)
    assert (watch.held(0), watch.held(1)) == (before[0], before[1] + 400)
    with torch.get_device_module(device).device(1):
        assert torch.empty(1, device=torch.device(device).type).device == torch.device(other)
    assert (x + 1).device == x.device
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.empty(1, device=other.replace("1", "2"))


def test_backward_runs_on_the_device_of_the_forward(device, other):
    x = torch.ones(4, device=device, requires_grad=True)
    (x.to(other) * 2).to(device).sum().backward()
    assert x.grad.device == x.device and torch.equal(x.grad.cpu(), torch.full((4,), 2.0))


def test_its_memory_has_an_end(device):
    with watch.limited_to(1000):
        x = torch.empty(200, device=device)
        with pytest.raises(torch.OutOfMemoryError, match="200 bytes|out of memory"):
            torch.empty(200, device=device)
        del x
        torch.empty(200, device=device)
    torch.empty(2000, device=device)


def test_the_peak_of_its_memory_is_told(device):
    with watch.peak() as most:
        x = torch.empty(100, device=device)
        torch.empty(500, device=device)
    assert most == [2400]
    del x


def test_new_memory_is_not_right_by_luck(device):
    torch.zeros(64, device=device)
    assert torch.empty(64, device=device).isnan().all()


def test_a_copy_that_nobody_waited_for_is_not_there_yet(device):
    x = torch.randn(16, device=device)
    with watch.watch() as seen:
        y = x.to("cpu", non_blocking=True)
        assert y.is_pinned() and y.isnan().all()
        x.zero_()  # later on the stream
        torch.get_device_module(device).synchronize()
    assert seen.waits == ["synchronize"]
    assert not y.isnan().any() and (y != 0).all()


def test_a_copy_from_pinned_memory_does_not_wait(device):
    pinned = torch.randn(16).pin_memory()
    assert pinned.is_pinned() and pinned[4:].is_pinned() and not torch.randn(16).is_pinned()
    for host, waits in ((pinned, []), (torch.randn(16), ["copy host to device"])):
        with watch.watch() as seen:
            there = host.to(device, non_blocking=True)
        assert seen.waits == waits and torch.equal(there.cpu(), host)


@pytest.mark.parametrize("where", ["device", "other", "cpu", None])
def test_tensors_are_saved_and_loaded_anywhere(where, device, other, tmp_path):
    x = torch.randn(16)
    torch.save(x.to(device), tmp_path / "x")
    place = {"device": device, "other": other}.get(where, where)
    y = torch.load(tmp_path / "x", map_location=place)
    assert y.device == torch.device(place or device) and torch.equal(y.cpu(), x)


def test_random_numbers_are_those_of_the_cpu(device):
    torch.manual_seed(0)
    there = torch.randn(4, device=device), torch.nn.functional.dropout(torch.ones(8, device=device))
    torch.manual_seed(0)
    here = torch.randn(4), torch.nn.functional.dropout(torch.ones(8))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here, strict=True))
