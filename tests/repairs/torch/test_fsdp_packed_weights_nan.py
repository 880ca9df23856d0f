"""Packed 4-bit weights that read as NaN in the dtype in which they are stored, gathered by FSDP2 on two ranks."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import patches
from patches.engine import gate
from tests import forks

ID = "torch-fsdp-packed-weights"
RANKS = 2

pytestmark = pytest.mark.skipif(
    not gate.satisfied("bitsandbytes>=0.47"), reason="before 0.47 a CPU dequantizes from uint8 storage only"
)


class Block(torch.nn.Module):
    """A frozen 4-bit layer and a trained low-rank one, gathered together."""

    def __init__(self, storage: torch.dtype, device: str) -> None:
        super().__init__()
        options = {"bias": False, "quant_type": "nf4", "compute_dtype": torch.float32, "quant_storage": storage}
        self.base = Linear4bit(256, 256, **options).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(256, 4, bias=False), torch.nn.Linear(4, 256, bias=False)
        if storage.is_floating_point:
            self.down, self.up = self.down.to(storage), self.up.to(storage)  # one dtype in the group, as peft has it
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).float()


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).cpu().view(torch.uint8).flatten()


def trained(rank: int, folder: str, device: str, storage: str, apply: str) -> None:
    """A process: what it gathers, and the losses of three steps, into ``folder``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/file", RANKS), rank=rank, world_size=RANKS)
    gathered_as: list[torch.dtype] = []
    original = dist.all_gather_into_tensor

    def seen(output: torch.Tensor, *args, **kwargs):
        gathered_as.append(output.dtype)
        return original(output, *args, **kwargs)

    for name in {"all_gather_into_tensor", "all_gather_single"} & set(vars(dist)):
        setattr(dist, name, seen)
    try:
        if apply:
            patches.apply(*apply.split())
        torch.manual_seed(0)
        block = Block(getattr(torch, storage), device)
        codes = words(block.base.weight)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(9)).to(device)
        expected = block.base(x).detach()
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(block, mesh=init_device_mesh(device, (RANKS,)), mp_policy=policy)
        optimizer = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(3):
            loss = (block(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        block.unshard()
        changed = int((words(block.base.weight) != codes).sum())
        off = float((block.base(x).detach() - expected).norm() / expected.norm())
        torch.save((losses, changed, off, [str(each) for each in gathered_as]), f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


def on_two_ranks(folder, *arguments: str) -> list[tuple]:
    folder.mkdir()
    source = f"import sys; from {__name__} import trained; trained(int(sys.argv[1]), *sys.argv[2:])"
    ranks = [
        forks.Program(["-c", source, str(rank), str(folder), *arguments], dict(os.environ)) for rank in range(RANKS)
    ]
    assert [(done.returncode, done.stderr[-2000:]) for done in forks.run(*ranks, timeout=240) if done.returncode] == []
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_every_byte_arrives(storage, device, tmp_path):
    before = on_two_ranks(tmp_path / "before", device, storage, "")
    after = on_two_ranks(tmp_path / "after", device, storage, ID)
    for losses, changed, off, gathered_as in after:
        assert (changed, off) == (0, 0.0)
        assert losses[-1] < losses[0]
        assert set(gathered_as) == {"torch.uint8"}
    for losses, changed, _, gathered_as in before:
        assert (changed > 0) is (device != "cpu"), "a CPU copies every bit"
        assert set(gathered_as) == {f"torch.{storage}"}
        if device == "cpu":
            assert losses == after[0][0], "right stays right"


def test_nothing_else_is_gathered_otherwise(tmp_path):
    """Packed bytes that are stored as bytes: torch gathers them beside an adapter of floats as bytes anyway."""
    before, after = (on_two_ranks(tmp_path / (apply or "none"), "cpu", "uint8", apply) for apply in ("", ID))
    assert before == after
