"""Small quantized models with every kind of adapter that peft merges into them, and the bits of their base."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch

from patches.engine.gate import satisfied

KINDS = ("nf4", "nf4-double", "int8")
ADAPTERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "lora": ("LoraConfig", {"r": 4, "init_lora_weights": False}, "peft>=0.14"),
    "dora": ("LoraConfig", {"r": 4, "init_lora_weights": False, "use_dora": True}, "peft>=0.14"),
    "lora-bias": ("LoraConfig", {"r": 4, "init_lora_weights": False, "lora_bias": True}, "peft>=0.14"),
    "vera": ("VeraConfig", {"r": 4, "init_weights": False}, "peft>=0.14"),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 16, "init_weights": False}, "peft>=0.16,!=0.20.0"),
    "randlora": ("RandLoraConfig", {"r": 4, "randlora_alpha": 1, "init_weights": False}, "peft>=0.16"),
    "road": ("RoadConfig", {"group_size": 16, "init_weights": False}, "peft>=0.18"),
    "pvera": ("PveraConfig", {"r": 4, "init_weights": False}, "peft>=0.19"),
    "hira": ("HiraConfig", {"r": 4, "init_weights": False}, "peft>=0.20"),
    "boft": ("BOFTConfig", {"boft_block_size": 16, "init_weights": False}, "peft>=0.20"),
    "miss": ("MissConfig", {"r": 4, "init_weights": False}, "peft>=0.20"),
    "shira": ("ShiraConfig", {"r": 4, "init_weights": False}, "peft>=0.20"),
}  # fmt: skip
"""The configuration, its options, and since when peft merges such an adapter into quantized layers."""


def config(adapter: str, **options: Any) -> Any:
    name, own, since = ADAPTERS[adapter]
    if not satisfied(since):
        pytest.skip(f"peft {peft.__version__} cannot merge {adapter} into quantized layers; {since} can")
    return getattr(peft, name)(**{"target_modules": ["0", "1"], **own, **options})


def base_of(kind: str, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "int8":
        layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2)]
    else:
        quantized, double = kind[:3], kind.endswith("double")
        layers = [
            bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type=quantized, compress_statistics=double)
            for _ in range(2)
        ]
    model = torch.nn.Sequential(*layers).to(device)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"  # as from_pretrained says it
    return model.requires_grad_(False)


def adapted(kind: str, adapter: str, device: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base_of(kind, device), config(adapter, **options)).eval()


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Packed weights, statistics and biases of the base layers."""
    return {name: t.clone() for name, t in model.state_dict().items() if "base_layer" in name}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train_a_little(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.01)


def layers(model: torch.nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def store_as_1_1(model) -> None:
    """Give the snapshots the place and the keys that the plugin 1.1 gave them."""
    names = dict(
        weight_class="class", packed_weight="codes", weight_had_module="knows module", bias_was_merged="bias changed"
    )
    for layer in layers(model):
        snapshot = vars(layer).pop("_patches_merge_snapshot")
        vars(layer)["_patches_before_merge"] = {names.get(key, key): value for key, value in snapshot.items()}
