"""What one number of ranks saved, loaded by another, in each way that torch has, and trained on."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.distributed import models
from tests.distributed.models import X, Y, off
from tests.distributed.training import Outcome, shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
EXACT, ROUNDED = 1e-5, 1e-4
"""Of the losses of the next steps; a state that goes from 32 bits into 8 is rounded."""


def optimizer_of(name: str, model: nn.Module) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "torch":
        return torch.optim.AdamW(parameters, lr=1e-2)
    return getattr(bnb.optim, name)(parameters, lr=1e-2, min_8bit_size=256)


def made(kind: str, optimizer: str, world: int, seed: int = 0, adapter: int = 1) -> tuple[nn.Module, Any]:
    model = models.adapted(kind, "lora", seed, adapter)
    if world:
        shard(model)
    return model, optimizer_of(optimizer, model)


def step(model: nn.Module, optimizer: Any) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    loss = (model(X.chunk(world)[rank]) - Y.chunk(world)[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found = loss.detach().clone()
    dist.all_reduce(found)
    return float(found / world)


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X).clone()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder: Path, world: int, kind: str, name: str) -> Outcome:
    model, optimizer = made(kind, name, world)
    for _ in range(2):
        step(model, optimizer)
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_of(model, optimizer), checkpoint_id=folder / "dcp")
        future: Any = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder / "async")
        future.result()
    full = copy.deepcopy(
        [get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)]
    )
    expected = {"outputs": outputs(model), "losses": [step(model, optimizer) for _ in range(2)]}
    if rank == 0:
        torch.save({**expected, "full": full, "bits": _bits(optimizer)}, folder / "expected.pt")
    dist.barrier()
    return "right", ""


def _bits(optimizer: Any) -> list[str]:
    return [str(state[key].dtype) for state in optimizer.state.values() for key in ("state1", "state2") if key in state]


def load(folder: Path, world: int, kind: str, name: str, way: str, seed: int) -> Outcome:
    if not (folder / "expected.pt").exists():
        return "none", "nothing was saved"
    expected = torch.load(folder / "expected.pt", weights_only=False)
    model, optimizer = made(kind, name, world, seed, adapter=3)
    before = off(outputs(model), expected["outputs"])
    assert before > 1e-3, "there is something to load"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        put(folder, model, optimizer, way, expected["full"])
    now = off(outputs(model), expected["outputs"])
    losses = [step(model, optimizer) for _ in range(2)]
    later = off(losses, expected["losses"])
    enough = EXACT if _bits(optimizer) == expected["bits"] else ROUNDED
    good = now < EXACT and later < enough
    return ("right", "") if good else ("wrong", f"outputs {now:.1e} (before {before:.1e}), next losses {later:.1e}")


def put(folder: Path, model: nn.Module, optimizer: Any, way: str, full: list[Any]) -> None:
    if way in ("dcp", "async", "partial"):
        into = state_of(model, optimizer)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=way == "partial")
        dcp.load(into, checkpoint_id=folder / ("async" if way == "async" else "dcp"), planner=planner)
        set_model_state_dict(model, into["model"])
        set_optimizer_state_dict(model, optimizer, into["optimizer"])
        return
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=way.startswith("broadcast"), strict=way != "broadcast-lenient",
        cpu_offload=way == "broadcast-offload",
    )  # fmt: skip
    if way.startswith("broadcast") and dist.get_rank():
        full = [{}, {}]
    set_model_state_dict(model, full[0], options=options)
    set_optimizer_state_dict(model, optimizer, full[1], options=options)


def adapter(folder: Path, kind: str, method: str, what: str) -> Outcome:
    """An adapter of a sharded model, saved as peft saves it and loaded in one process; or merged where it is."""
    model = shard(models.adapted(kind, method))
    expected = outputs(model)
    if what == "merge":
        model.merge_adapter()  # type: ignore[operator]
        found = outputs(model)
        enough = 0.2  # what rounding the merged weight costs
    else:
        whole = get_model_state_dict(model, options=FULL)
        plain = models.adapted(kind, method, adapter=3)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(str(folder), state_dict=whole)  # type: ignore[operator]
        dist.barrier()
        saved = peft.utils.load_peft_weights(str(folder), device="cpu")
        peft.set_peft_model_state_dict(plain, saved)
        found, enough = outputs(plain), EXACT
    error = off(found, expected)
    return ("right", "") if error < enough else ("wrong", f"outputs {error:.1e}")
