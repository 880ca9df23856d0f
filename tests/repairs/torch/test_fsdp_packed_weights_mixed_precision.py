"""4-bit layers under FSDP2 with a policy of mixed precision, on one rank and on two."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import EmbeddingNF4, Linear4bit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import patches
from patches.engine import gate
from tests import forks

ID = "torch-fsdp-packed-weights"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

needs_float_storage = pytest.mark.skipif(
    not gate.satisfied("bitsandbytes>=0.47"), reason="before 0.47 a CPU dequantizes from uint8 storage only"
)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "file"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(storage: torch.dtype, bias: bool = True) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=bias, quant_type="nf4", compute_dtype=torch.float32, quant_storage=storage)
    return torch.nn.Sequential(layer.requires_grad_(False).to("cpu"))


def shard(module: torch.nn.Module, dtype: torch.dtype | None, **options) -> torch.nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False, **options)
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    return ((result - reference).norm() / reference.norm()).item()


@needs_float_storage
@pytest.mark.parametrize("param_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("storage", FLOATS, ids=str)
def test_layer_computes_what_it_computes_without_a_policy(one_rank, storage, param_dtype):
    expected = model(storage, bias=False)(X)
    with patches.applied(ID):
        assert torch.equal(shard(model(storage, bias=False), param_dtype)(X), expected)
    if storage == param_dtype:
        assert torch.equal(shard(model(storage, bias=False), param_dtype)(X), expected)


@needs_float_storage
def test_unpatched_the_outputs_are_wrong_without_a_word(one_rank):
    result = shard(model(torch.bfloat16, bias=False), torch.float16)(X)
    assert relative(result, model(torch.bfloat16, bias=False)(X)) > 0.5


@pytest.mark.parametrize("param_dtype", FLOATS, ids=str)
def test_bytes_of_codes_stay_as_they_are(one_rank, param_dtype):
    """What the codes are stored as does not matter, nor that some of them are NaN in bfloat16."""
    for storage in (torch.uint8, *FLOATS):
        codes = model(storage)[0].weight.data.view(torch.uint8).clone()
        with patches.applied(ID):
            sharded = shard(model(storage), param_dtype)
            sharded.unshard()
            assert torch.equal(sharded[0].weight.data.view(torch.uint8), codes)


def test_the_bias_is_cast_as_asked(one_rank):
    with patches.applied(ID):
        sharded = shard(model(torch.float32), torch.bfloat16)
        sharded.unshard()
        assert (sharded[0].weight.dtype, sharded[0].bias.dtype) == (torch.float32, torch.bfloat16)


def test_layers_that_hold_no_codes_are_cast_as_before(one_rank):
    """Those that bitsandbytes does not know, and 4-bit layers that nobody has quantized yet."""
    four_bit = (Linear4bit(64, 64, quant_storage=torch.float32), EmbeddingNF4(16, 64))
    for layer in (torch.nn.Linear(64, 64), torch.nn.Embedding(16, 64), *four_bit):
        with patches.applied(ID):
            shard(torch.nn.Sequential(layer), torch.bfloat16).unshard()
            assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}


def test_bytes_of_an_embedding_stay_as_they_are(one_rank):
    """Its forward under FSDP2 is another matter: it dies for want of a ``quant_storage``, policy or not."""
    embedding = EmbeddingNF4(16, 64, quant_storage=torch.bfloat16).requires_grad_(False).to("cpu")
    codes = embedding.weight.data.view(torch.uint8).clone()
    with patches.applied(ID):
        shard(embedding, torch.float16).unshard()
        assert torch.equal(embedding.weight.data.view(torch.uint8), codes)


class WithAdapter(torch.nn.Module):
    """A frozen 4-bit layer and a trained low-rank one, gathered together."""

    def __init__(self) -> None:
        super().__init__()
        self.base = model(torch.float32, bias=False)[0]
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).float()


def losses(module: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(4):
        loss = (module(X) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def train(rank: int, ranks: int, folder: str, policy: torch.dtype | None) -> None:
    """A process: train :class:`WithAdapter`, sharded over ``ranks``, and write its losses into ``folder``."""
    store = dist.FileStore(f"{folder}/file", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        with patches.applied(ID):
            module = shard(WithAdapter(), policy, reduce_dtype=torch.float32)
            torch.save(losses(module), f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


@needs_float_storage
def test_training_an_adapter_on_two_ranks(tmp_path):
    alone = losses(WithAdapter())
    source = f"import sys, torch; from {__name__} import train; train(int(sys.argv[1]), 2, sys.argv[2], torch.bfloat16)"
    ranks = [forks.Program(["-c", source, str(rank), str(tmp_path)], dict(os.environ)) for rank in range(2)]
    assert [(done.returncode, done.stderr[-2000:]) for done in forks.run(*ranks, timeout=240) if done.returncode] == []
    for rank in range(2):
        together = torch.load(tmp_path / str(rank))
        assert together == pytest.approx(alone, rel=0.01)
        assert together[-1] < together[0]
