"""The models: every class that diffusers exports from the folders of its transformers, UNets and ControlNets."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from . import table_flux, table_images, table_others, table_unets, table_videos
from .tiny import Tiny

FOLDERS = {"transformer": "transformers", "UNet": "unets", "ControlNet": "controlnets"}
"""What a class is for, and the folder of ``diffusers.models`` that has it."""
TABLE: dict[str, Tiny | str] = {
    **table_flux.TABLE, **table_images.TABLE, **table_videos.TABLE, **table_others.TABLE, **table_unets.TABLE,
}  # fmt: skip
USED_MOST = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel",
    "WanTransformer3DModel", "HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel", "CogVideoXTransformer3DModel",
    "ZImageTransformer2DModel", "SanaTransformer2DModel", "PixArtTransformer2DModel", "Lumina2Transformer2DModel",
    "ChromaTransformer2DModel", "UNet2DConditionModel",
)  # fmt: skip
"""The classes that are compiled without the plugin, too."""


def classes() -> dict[str, Any]:
    """Each class by its purpose and name, and again for each other configuration that the tables have of it."""
    from diffusers import ModelMixin

    found: dict[str, Any] = {}
    for purpose, folder in FOLDERS.items():
        module = importlib.import_module(f"diffusers.models.{folder}")
        for name in sorted(dir(module)):
            kind = getattr(module, name)
            if inspect.isclass(kind) and issubclass(kind, ModelMixin):
                variants = [each for each in TABLE if each.startswith(f"{name} (")]
                found |= {f"{purpose}: {each}": kind for each in (name, *variants)}
    return found
