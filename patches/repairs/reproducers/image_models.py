"""Tiny image models on disk, for reproducers that begin with ``from_pretrained`` of diffusers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ...engine import CannotShow
from ...engine.gate import satisfied


def make_flux(**also: Any) -> Any:
    """Make a FLUX transformer of one double and one single block, in float32; ``also`` goes to its configuration."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}
    inputs = {"patch_size": 1, "in_channels": 64, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    return FluxTransformer2DModel(**{**sizes, **inputs, "axes_dims_rope": (4, 4, 8), **also})


def save_flux(folder: str, **also: Any) -> None:
    """Save such a transformer in ``folder``."""
    make_flux(**also).save_pretrained(folder)


def load_flux(folder: str, **how: Any) -> Any:
    """Load the transformer in ``folder`` as on a machine with a GPU, whole on the CPU; ``how`` are options of BitsAndBytesConfig."""
    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    if "load_in_8bit" in how and (satisfied("diffusers<0.37") or satisfied("bitsandbytes<0.48")):
        raise CannotShow("on these releases, INT8 on the CPU needs the patch diffusers-device-map-refused")
    config = BitsAndBytesConfig(**how, llm_int8_enable_fp32_cpu_offload=True)  # or diffusers refuses a map with "cpu"
    options = {"quantization_config": config, "torch_dtype": torch.float32, "device_map": {"": "cpu"}}
    with as_with_gpu():
        return FluxTransformer2DModel.from_pretrained(folder, **options)


def flux_inputs(dtype: Any) -> dict[str, Any]:
    """Make inputs of such a transformer: 16 latents and 8 tokens of text."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden_states": random(1, 16, 64),
        "encoder_hidden_states": random(1, 8, 64),
        "pooled_projections": random(1, 64),
        "timestep": torch.ones(1, dtype=dtype),
        "img_ids": random(16, 3),
        "txt_ids": random(8, 3),
    }


@contextlib.contextmanager
def as_with_gpu() -> Iterator[None]:
    """Let the quantizers of diffusers, which refuse a machine without a GPU, find one; nothing else finds it."""
    import torch

    upstream = torch.cuda.is_available

    def is_available() -> bool:
        return sys._getframe(1).f_globals["__name__"].startswith("diffusers.quantizers.bitsandbytes") or upstream()

    torch.cuda.is_available = is_available
    try:
        yield
    finally:
        torch.cuda.is_available = upstream
