"""Models that diffusers offloads to the disk in groups, for reproducers that run on a CPU."""

from __future__ import annotations

from typing import Any

from ...engine import CannotShow


def offload_to_disk(model: Any, folder: str) -> None:
    """Offload ``model`` layer by layer to ``folder``; it runs on the CPU."""
    import torch
    from diffusers.hooks import apply_group_offloading

    try:
        apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=folder)
    except AttributeError as error:
        raise CannotShow("this release of diffusers offloads in groups only where there is an accelerator") from error
