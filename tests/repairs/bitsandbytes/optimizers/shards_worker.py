"""Worker of test_steps_on_shards.py, one process a rank: ``shards_worker.py OUT NAME,NAME``.

Each optimizer trains a model under FSDP2, and the same model whole on each rank, on the same batch: the mean over the
ranks of equal gradients is that gradient to the bit. Then it goes on from a checkpoint, in each way that torch offers.
The parent's tests judge what is written to ``OUT/<rank>.json``.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

logging.disable(logging.WARNING)

import bitsandbytes.optim  # noqa: E402, with this import the entry point runs
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint import state_dict as checkpoint  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

OUT, NAMES = Path(sys.argv[1]), sys.argv[2].split(",")
FULL = checkpoint.StateDictOptions(full_state_dict=True)
FROM_RANK_0 = checkpoint.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OPTIONS = {"SGD": {"momentum": 0.9}, "LARS": {"momentum": 0.9}, "AdEMAMix": {"t_alpha": 4, "t_beta3": 4}}
CUT = ("odd.weight", "row.weight")
"""Large enough for 8 bits, but their shards are no whole blocks."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(128, 96)
        self.odd = nn.Linear(96, 65)
        self.row = nn.Linear(4100, 1, bias=False)  # nothing of it is on the second rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(torch.tanh(self.even(x))).square().mean() + self.row(x.new_ones(4100)).square().sum()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: Net) -> Net:
    mesh = init_device_mesh("cpu", (2,))
    for part in model.children():
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizer_of(name: str, model: nn.Module) -> Any:
    options = next((options for prefix, options in OPTIONS.items() if prefix in name), {})
    return getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 128)).backward()
        optimizer.step()


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    """The parameters that are not equal to the bit."""
    pairs = zip(model.named_parameters(), other.parameters())
    return [name for (name, one), two in pairs if not torch.equal(whole(one.data), whole(two.data))]


def differing_states(model: nn.Module, optimizer: Any, other: nn.Module, others: Any) -> list[str]:
    found = []
    for (name, one), two in zip(model.named_parameters(), other.parameters()):
        states, expected = optimizer.state[one], others.state[two]
        found += [f"{name}: {key}" for key in states.keys() ^ expected.keys()]
        for key in sorted(states.keys() & expected.keys()):  # in the same order on each rank
            a, b = whole(states[key]), whole(expected[key])
            if not (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b):
                found.append(f"{name}: {key}")
    return found


def run(name: str, rank: int) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    alone, model = net(), shard(net())
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.override_config([p for n, p in alone.named_parameters() if n in CUT], "optim_bits", 32)
    expected, optimizer = optimizer_of(name, alone), optimizer_of(name, model)
    train(alone, expected, range(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, range(3))
    answer["warnings"] = sorted({str(warning.message) for warning in caught if "shard size" in str(warning.message)})
    answer["training"] = differing(model, alone)
    answer["states"] = differing_states(model, optimizer, alone, expected)
    answer["state of even"] = str(optimizer.state[model.even.weight]["state1"].dtype)
    answer["on this rank"] = optimizer.state[model.even.weight]["state1"].to_local().nbytes

    saved = {
        "model": checkpoint.get_model_state_dict(model),
        "optimizer": checkpoint.get_optimizer_state_dict(model, optimizer),
    }
    folder = OUT / f"dcp-{name}"
    dcp.save(copy.deepcopy(saved), checkpoint_id=folder)
    full = [
        checkpoint.get_model_state_dict(model, options=FULL),
        checkpoint.get_optimizer_state_dict(model, optimizer, options=FULL),
    ]
    full = copy.deepcopy(full)
    own = copy.deepcopy(optimizer.state_dict())
    train(alone, expected, range(3, 5))
    train(model, optimizer, range(3, 5))
    answer["further"] = differing(model, alone)

    resumed = shard(net(seed=1))
    again = optimizer_of(name, resumed)
    into = {
        "model": checkpoint.get_model_state_dict(resumed),
        "optimizer": checkpoint.get_optimizer_state_dict(resumed, again),
    }
    dcp.load(into, checkpoint_id=folder)
    checkpoint.set_model_state_dict(resumed, into["model"])
    checkpoint.set_optimizer_state_dict(resumed, again, into["optimizer"])
    train(resumed, again, range(3, 5))
    answer["resumed"] = differing(resumed, alone)

    one = net(seed=1)
    single = optimizer_of(name, one)
    checkpoint.set_model_state_dict(one, full[0])
    checkpoint.set_optimizer_state_dict(one, single, full[1], options=FULL)
    train(one, single, range(3, 5))
    answer["resumed in one process"] = differing(one, alone)

    for way, options in (("from full", FULL), ("from rank 0", FROM_RANK_0)):
        resumed = shard(net(seed=1))
        again = optimizer_of(name, resumed)
        mine = full if way == "from full" or rank == 0 else [{}, {}]
        checkpoint.set_model_state_dict(resumed, dict(mine[0]), options=options)
        try:
            checkpoint.set_optimizer_state_dict(resumed, again, copy.deepcopy(mine[1]), options=options)
            train(resumed, again, range(3, 5))
            answer[way] = differing(resumed, alone)
        except Exception as error:
            answer[way] = f"{type(error).__name__}: {error}"

    resumed = shard(net(seed=1))
    again = optimizer_of(name, resumed)
    checkpoint.set_model_state_dict(resumed, full[0], options=FULL)
    again.load_state_dict(own)
    train(resumed, again, range(3, 5))
    answer["its own state dict"] = differing(resumed, alone)
    return answer


def refusals() -> dict[str, str]:
    """What cannot be done, and what it says."""
    found = {}
    for name in ("LARS", "LAMB"):
        model = shard(net())
        try:
            train(model, optimizer_of(name, model), range(1))
        except NotImplementedError as error:
            found[name] = str(error)
    alone, model = net(), shard(net())
    expected, optimizer = optimizer_of("Adam8bit", alone), optimizer_of("Adam8bit", model)
    train(alone, expected, range(1))
    optimizer.load_state_dict(expected.state_dict())
    try:
        train(model, optimizer, range(1))
    except ValueError as error:
        found["state of one process"] = str(error)
    return found


def other_meshes() -> dict[str, bool]:
    """Weights as hybrid sharding leaves them, and as tensor parallelism does along the second dimension."""
    found = {}
    data = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for what, shape, placements, bits in [
        ("replicated and sharded", (1, 2), [Replicate(), Shard(0)], 8),
        ("replicated", (2,), [Replicate()], 8),
        ("columns", (2,), [Shard(1)], 32),
    ]:
        mesh = init_device_mesh("cpu", shape)
        alone = nn.Parameter(data.clone())
        parameter = nn.Parameter(distribute_tensor(data.clone(), mesh, placements))
        one, two = bitsandbytes.optim.Adam([alone], optim_bits=bits), bitsandbytes.optim.Adam([parameter], optim_bits=8)
        for step in range(3):
            alone.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
            parameter.grad = distribute_tensor(
                alone.grad.clone(), mesh, placements if step else [Replicate()] * len(shape)
            )
            one.step()
            two.step()
        found[what] = torch.equal(whole(parameter.data), alone.data)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    answer: dict[str, Any] = {}
    try:
        answer["other meshes"] = other_meshes()
        answer["refusals"] = refusals()
        for name in NAMES:
            answer[name] = run(name, rank)
    finally:
        (OUT / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
