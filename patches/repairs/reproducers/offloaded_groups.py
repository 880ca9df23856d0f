"""Models that diffusers offloads to the disk in groups, for reproducers that run on a CPU."""

from __future__ import annotations

from typing import Any

from ...engine import CannotShow
from ...engine.gate import satisfied


def offload_to_disk(model: Any, folder: str) -> None:
    """Offload ``model`` layer by layer to ``folder``; it runs on the CPU."""
    import torch

    if satisfied("diffusers<0.35"):
        raise CannotShow("diffusers 0.33 and 0.34 offload groups in functions that are not repaired")
    from diffusers.hooks import apply_group_offloading

    try:
        apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=folder)
    except AttributeError as error:
        raise CannotShow("this release of diffusers offloads in groups only where there is an accelerator") from error
