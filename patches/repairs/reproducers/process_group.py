"""A process group of one rank: what reproducers about FSDP2 and DistributedDataParallel run in."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """Make this process the only rank of a group on the CPU, and give its device mesh; the group ends with the ``with``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()
