"""Two steps on several ranks, each on its part of the batch, against the same steps in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed import models
from tests.distributed.models import X, Y, net_of, off, trained, whole

Outcome = tuple[str, str]
_references: dict[tuple[str, str, str], Any] = {}
TOLERANCE = 2e-4  # of sums in another order, through two steps of Adam


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net_of(model).blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cell(wrap: str, kind: str, method: str, variation: str) -> Outcome:
    try:
        reference = _reference(kind, method, variation)
    except Exception as error:
        return "none", f"one process: {type(error).__name__}: {str(error)[:100]}"
    model = _prepared(kind, method, variation)
    wrapped = model
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif wrap == "fsdp2":
        shard(model)
    else:
        wrapped = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    losses, grads = _train(wrapped, wrap, variation)
    summon = FSDP.summon_full_params(wrapped) if wrap == "fsdp1" else contextlib.nullcontext()
    with summon:
        found = [losses, grads, {_name(n): whole(p) for n, p in trained(wrapped).items()}]
    if wrap == "fsdp1":
        found[1] = reference[1]  # lie flat
    wrongs = {what: worst for what, a, b in zip(("losses", "gradients", "weights"), found, reference)
              if not (worst := _worst(a, b)) < TOLERANCE}  # fmt: skip
    return ("wrong", f"{wrongs}") if wrongs else ("right", "")


def embedding(wrap: str, kind: str, policy: str) -> Outcome:
    """A quantized embedding, and one step of the layer behind it."""
    alone = _embedded_step(models.embedded(kind), 1, 0)
    model = models.embedded(kind)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrap == "fsdp1":
        model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        mixed = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)} if policy == "mixed" else {}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh, **mixed)
        fully_shard(model, mesh=mesh)
    found = _embedded_step(model, dist.get_world_size(), dist.get_rank())
    worst = max(off(a, b) for a, b in zip(found, alone))
    return ("right", "") if worst < TOLERANCE else ("wrong", f"output and loss after a step {worst:.1e}")


def _embedded_step(model: nn.Module, world: int, rank: int) -> list[torch.Tensor]:
    """The loss before and after a step, of all rows."""
    ids, expected = models.IDS.chunk(world)[rank], Y.chunk(world)[rank]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    losses = []
    for _ in range(2):
        loss = (model(ids) - expected).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total / world)
    return losses


def _name(name: str) -> str:
    for word in ("module.", "_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(word, "")
    return name


def _worst(found: Any, expected: Any) -> float:
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return float("inf")
        return max((off(found[key], expected[key]) for key in expected), default=0.0)
    return off(found, expected)


def _reference(kind: str, method: str, variation: str) -> Any:
    plain = "clip" if variation == "clip" else "accumulate" if variation == "accumulate" else "step"
    key = (kind, method, plain)
    if key not in _references:
        model = _prepared(kind, method, plain)
        losses, grads = _train(model, "", plain)
        _references[key] = [losses, grads, {n: whole(p) for n, p in trained(model).items()}]
    return _references[key]


def _prepared(kind: str, method: str, variation: str) -> nn.Module:
    model = models.adapted(kind, method)
    net = net_of(model)
    net.checkpointing = variation == "checkpointing"
    if variation == "compiled":
        for block in net.blocks:
            block.compile(backend="aot_eager")
    return model


def _train(model: nn.Module, wrap: str, variation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    world, rank = (dist.get_world_size(), dist.get_rank()) if wrap else (1, 0)
    x, y = X.chunk(world)[rank], Y.chunk(world)[rank]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)
    pieces = 2 if variation == "accumulate" else 1
    losses, grads = [], {}
    for _ in range(2):
        for piece in range(pieces):
            last = piece == pieces - 1
            if wrap == "fsdp2":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            quiet = model.no_sync() if wrap in ("ddp", "fsdp1") and not last else contextlib.nullcontext()  # type: ignore[operator]
            with quiet:
                loss = (model(x[:, piece::pieces]) - y[:, piece::pieces]).square().mean() * _share(x, piece, pieces)
                loss.backward()
            losses.append(loss.detach().clone())
        if variation == "clip":
            if wrap == "fsdp1":
                model.clip_grad_norm_(0.01)  # type: ignore[operator]
            else:
                nn.utils.clip_grad_norm_(parameters, 0.01)
        if not grads:
            grads = {
                _name(n): whole(p.grad) for n, p in trained(model).items() if p.grad is not None and wrap != "fsdp1"
            }
        optimizer.step()
        optimizer.zero_grad()
    all_losses = torch.stack(losses)
    if wrap:
        dist.all_reduce(all_losses)
    return all_losses / world, grads


def _share(x: torch.Tensor, piece: int, pieces: int) -> float:
    return x[:, piece::pieces].shape[1] / x.shape[1]
