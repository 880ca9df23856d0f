"""Quantized layers under FSDP2 of torch before 2.12; `make stacks` runs them on two ranks there."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import patches
from patches.engine import gate
from patches.repairs.torch import fsdp_integer_weights as repair

ID = "torch-fsdp-integer-weights"
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
def test_only_what_can_take_gradients_takes_them(dtype):
    made = repair.parameter(torch.zeros(2, dtype=dtype))
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


@pytest.mark.parametrize(("torch_is", "said"), [("older", 1), ("newer", 0)])
def test_a_torch_that_adds_up_gradients_on_a_cpu_is_named_once(monkeypatch, caplog, torch_is, said):
    monkeypatch.setattr(repair, "satisfied", lambda requirement: torch_is == "older")
    repair._say_that_gradients_are_added.cache_clear()
    for _ in range(2):
        repair.parameter(torch.zeros(2, dtype=torch.int8))
        repair.parameter(torch.zeros(2))
    assert len(caplog.records) == said and all("adds up the gradients" in each.message for each in caplog.records)
    repair._say_that_gradients_are_added.cache_clear()


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
