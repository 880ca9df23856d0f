"""Quantized embeddings under FSDP2, on one rank; two ranks are in tests/distributed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import Embedding4bit, Embedding8bit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import patches
from patches.engine import gate

ID = "bitsandbytes-embeddings-sharded"
IDS = torch.tensor([[0, 5, 29], [5, 1, 2]])
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4"},
    "fp4 in bfloat16": {"quant_type": "fp4", "quant_storage": torch.bfloat16},
    "nf4 in float32": {"quant_type": "nf4", "quant_storage": torch.float32},
    "int8": {},
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(kind: str, width: int = 64) -> nn.Module:
    if " in " in kind and not gate.satisfied("bitsandbytes>=0.47"):
        pytest.skip("before 0.47 a CPU dequantizes from uint8 storage only")
    torch.manual_seed(0)
    cls = Embedding8bit if kind == "int8" else Embedding4bit
    return cls(32, width, dtype=torch.float32, **KINDS[kind]).requires_grad_(False).to("cpu")


def shard(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), **options)


@pytest.mark.parametrize("width", [64, 48], ids=["rows of whole blocks", "rows that cut blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_one_process_does(kind: str, width: int) -> None:
    if kind == "nf4 in float32" and width == 48:
        width = 56
    expected = made(kind, width)(IDS)
    model = nn.Sequential(made(kind, width), nn.Linear(width, 8))
    with patches.applied(ID):
        shard(model[0]), shard(model)
        for _ in range(2):
            model(IDS).sum().backward()
        assert torch.equal(model[0](IDS), expected)
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_of_mixed_precision_leaves_its_bits(kind: str) -> None:
    expected = made(kind)(IDS)
    with patches.applied(ID, "torch-fsdp-packed-weights"):
        model = shard(made(kind), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
        assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_tensor_that_is_not_of_fsdp_is_an_error_as_before(kind: str) -> None:
    other = made(kind)
    with patches.applied(ID):
        layer = made(kind)
        layer.weight = nn.Parameter(other.weight.detach().as_subclass(torch.Tensor), requires_grad=False)
        with pytest.raises((AttributeError, RuntimeError), match="quant_storage|not quantized"):
            layer(IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_quantized_weight_brings_its_own_scales(kind: str) -> None:
    torch.manual_seed(1)
    with patches.applied(ID):
        sharded, new = shard(made(kind)), made(kind)
        new.weight = copy.deepcopy(new.weight)
        sharded(IDS)
        sharded.weight = new.weight
        assert torch.equal(sharded(IDS), new(IDS))


def test_a_layer_that_was_never_quantized_is_refused_as_before() -> None:
    torch.manual_seed(0)
    for applied in (False, True):
        layer = Embedding8bit(32, 64, dtype=torch.float32)
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(torch.Tensor))
        with patches.applied(*([ID] if applied else ["bitsandbytes-output-is-view"])):
            shard(layer)
            with pytest.raises(RuntimeError, match="not quantized"):
                layer(IDS)
