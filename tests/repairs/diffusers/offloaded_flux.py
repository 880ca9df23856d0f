"""A tiny FLUX whose blocks wait on the disk and compute on the CPU, and the same model loaded whole."""

from __future__ import annotations

from typing import Any

import torch

from . import image_options

NESTED = {**image_options.NF4, "bnb_4bit_use_double_quant": True}
KINDS = {"nf4": image_options.NF4, "nested": NESTED, "int8": image_options.INT8}
ON_DISK = {"": "cpu", "transformer_blocks": "disk", "proj_out": "disk"}


def split(folder: Any, how: dict[str, Any] | None, off: Any, **also: Any) -> Any:
    """Load the FLUX in ``folder`` with its double block and its last layer on the disk, in ``off``."""
    return image_options.load(folder, how, **{"device_map": dict(ON_DISK), "offload_folder": off, **also})


def add_lora(model: Any, seed: int = 0, name: str = "default") -> Any:
    """Add a LoRA with values, the same for each model, to the attention of ``model``."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    model.add_adapter(config, adapter_name=name)
    return model


def saved_tensors(folder: Any) -> dict[str, torch.Tensor]:
    """The tensors of all safetensors files in ``folder``."""
    from safetensors.torch import load_file

    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def assert_same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(one[name].dtype is two[name].dtype and torch.equal(one[name], two[name]) for name in one)
