"""How reproducers train and shard: steps of an optimizer, and FSDP2 on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...engine import CannotShow

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module


@contextlib.contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """Be the only rank of a process group, and yield its device mesh."""
    import tempfile

    import torch.distributed as dist

    if not dist.is_available():
        raise CannotShow("this torch is built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


def shard_quantized(layer: Module, mesh: DeviceMesh) -> None:
    """Apply ``fully_shard`` to ``layer``, whose weight is quantized, or raise ``CannotShow`` if this torch refuses to."""
    from torch.distributed.fsdp import fully_shard

    try:
        fully_shard(layer, mesh=mesh)
    except RuntimeError as error:  # torch 2.8
        if "floating point dtype can require gradients" not in str(error):
            raise
        raise CannotShow("FSDP2 of this torch cannot shard integer weights") from error


def take_steps(optimizer: Any, model: Module, steps: int = 1, x: Tensor | None = None) -> Exception | None:
    """Train ``model`` on ``x`` (two rows of 64 ones if it is None) and return the error that a step raised, or None.

    Before 0.50 no optimizer of bitsandbytes steps on a CPU: the first step makes the optimizer states and raises an error.
    """
    import torch

    for _ in range(steps):
        model(torch.ones(2, 64) if x is None else x).square().sum().backward()
        try:
            optimizer.step()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            return error
    return None
