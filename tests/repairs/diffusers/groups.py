"""What the tests of group offloading share: quantized layers, whole or offloaded, and what they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.device.layers import inputs, stack

LEAF = {"offload_type": "leaf_level"}
BLOCK = {"offload_type": "block_level", "num_blocks_per_group": 1}
KINDS = ("int8", "nf4", "nf4-nested")


def model(kind: str, device: str = "cpu", seed: int = 0) -> torch.nn.Sequential:
    """Three quantized layers; another ``seed`` gives other weights with the same names."""
    layers = stack(kind, None, 3)
    if seed:
        torch.manual_seed(seed)
        for parameter in layers.parameters():
            parameter.data.normal_()
    return layers.to(device).eval()


def offload(layers: torch.nn.Module, device: str = "cpu", folder: Path | None = None, **how: Any) -> torch.nn.Module:
    """Offload ``layers`` in groups, to the disk if there is a folder."""
    from diffusers.hooks import apply_group_offloading

    options = {"onload_device": torch.device(device), **LEAF, **how}
    apply_group_offloading(layers, **options, offload_to_disk_path=None if folder is None else str(folder))
    return layers


@torch.no_grad()
def run(layers: torch.nn.Module, device: str = "cpu") -> torch.Tensor:
    return layers(inputs(device, outliers=False)).cpu()
