"""A process group of one rank: what reproducers about FSDP2 and DistributedDataParallel run in."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...engine import CannotShow

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module


@contextlib.contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """Make this process the only rank of a group on the CPU, and give its device mesh; the group ends with the ``with``."""
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
