"""Quantized layers under FSDP2 of torch before 2.12; `make stacks` runs them on two ranks there."""

from __future__ import annotations

from contextlib import nullcontext

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import patches
from patches.engine import gate
from patches.repairs.torch import fsdp_packed_weights as repair

ID = "torch-fsdp-packed-weights"
MESSAGE = "only Tensors of floating point dtype can require gradients"
LAYERS = {
    "4-bit": lambda: bnb.nn.Linear4bit(64, 64, quant_type="nf4"),
    "INT8": lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False),
}
older = pytest.mark.skipif(not gate.satisfied("torch>=2.7,<2.12"), reason="the torch of another stack has the defect")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "file"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.complex64], ids=str)
def test_only_what_can_take_gradients_takes_them(one_rank, dtype):
    made = repair.parameter(DTensor.from_local(torch.zeros(2, dtype=dtype), one_rank, [Shard(0)]))
    assert made.requires_grad == (dtype in (torch.bfloat16, torch.complex64))


@older
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_sharded_and_computes_as_before(one_rank, kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]().requires_grad_(False).to("cpu")
    x = torch.randn(3, 64)
    expected = layer(x)
    with patches.applied():
        assert torch.equal(fully_shard(layer, mesh=one_rank)(x), expected)
        assert not any(each.requires_grad for each in layer.parameters())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("ranks, torch_is", [(2, "older"), (2, "newer"), (1, "older")])
def test_a_torch_that_adds_up_gradients_on_a_cpu_refuses_quantized_layers(monkeypatch, kind, ranks, torch_is):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        monkeypatch.setattr(repair, "satisfied", lambda requirement: torch_is == "older")
        weight = LAYERS[kind]().to("cpu").weight.data
        shard = DTensor.from_local(torch.zeros(2, dtype=weight.dtype), mesh, [Shard(0)], run_check=False)
        refused = ranks > 1 and torch_is == "older"
        with pytest.raises(RuntimeError, match="adds up the gradients") if refused else nullcontext():
            assert not repair.parameter(shard).requires_grad
        trained = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
        assert repair.parameter(trained).requires_grad  # as before: torch shards it unpatched, too
    finally:
        dist.destroy_process_group()


@older
@pytest.mark.parametrize("kind", LAYERS)
def test_unpatched_it_is_refused(one_rank, kind):
    with pytest.raises(RuntimeError, match=MESSAGE):
        fully_shard(LAYERS[kind]().requires_grad_(False).to("cpu"), mesh=one_rank)


@older
def test_a_layer_in_floating_point_is_sharded_as_before(one_rank):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    layer.bias.requires_grad_(False)
    layer(x).sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with patches.applied(ID):
        fully_shard(layer, mesh=one_rank, reshard_after_forward=1)(x).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), expected) and layer.bias.grad is None
