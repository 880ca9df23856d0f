"""A small residual model of quantized layers, adapted by a method of peft."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import peft
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, BATCH = 64, 128, 6  # a batch that 1, 2 and 3 ranks can share
STORAGE = {"u8": torch.uint8, "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TARGETS = ["up", "down"]
DATA = torch.Generator().manual_seed(5)
X, Y = torch.randn(BATCH, 3, WIDTH, generator=DATA), torch.randn(BATCH, 3, WIDTH, generator=DATA)
ROWS = 34
IDS = torch.randint(ROWS, (BATCH, 3), generator=DATA)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = _layer(kind, WIDTH, INNER), _layer(kind, INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.checkpointing = False
        setattr(self, f"is_loaded_in_{'8' if kind.startswith('int8') else '4'}bit", True)  # as transformers says it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


def _layer(kind: str, i: int, o: int) -> nn.Module:
    if kind.startswith("int8"):
        return bnb.nn.Linear8bitLt(i, o, has_fp16_weights=False, threshold=1.0 if kind == "int8-outliers" else 0.0)
    name, _, storage = kind.partition("-")
    return bnb.nn.Linear4bit(
        i, o, compute_dtype=torch.float32, compress_statistics=name == "nested",
        quant_type="fp4" if name == "fp4" else "nf4", quant_storage=STORAGE[storage or "u8"],
    )  # fmt: skip


def base(kind: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(kind).requires_grad_(False)
    if seed:  # other statistics, with other digits
        for p in net.parameters():
            p.data.mul_(1.37**seed)
    return net.to("cpu")


def embedded(kind: str) -> nn.Module:
    """A quantized embedding, and a layer behind it that is trained."""
    name, _, storage = kind.partition("-")
    torch.manual_seed(0)
    if name == "int8":
        table: nn.Module = bnb.nn.Embedding8bit(ROWS, WIDTH, dtype=torch.float32)
    else:
        options = {"quant_type": name, "quant_storage": STORAGE[storage or "u8"]}
        table = bnb.nn.Embedding4bit(ROWS, WIDTH, dtype=torch.float32, **options)
    return nn.Sequential(table.requires_grad_(False).to("cpu"), nn.Linear(WIDTH, WIDTH))


def adapted(kind: str, method: str, seed: int = 0, adapter: int = 1) -> nn.Module:
    net = base(kind, seed)
    torch.manual_seed(adapter)
    model = peft.get_peft_model(net, config(method)).train()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.02)
    return model


def config(method: str) -> Any:
    name, options = _CONFIGS[method]
    return getattr(peft, name)(target_modules=TARGETS, **options)


_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "lora_bias": ("LoraConfig", {"r": 4, "lora_bias": True}),
    "rslora": ("LoraConfig", {"r": 4, "use_rslora": True}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down"]}),
    "adalora": ("AdaLoraConfig", {"init_r": 4, "total_step": 10}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 16}),
    "boft": ("BOFTConfig", {"boft_block_size": 4}),
    "vera": ("VeraConfig", {"r": 4}),
    "randlora": ("RandLoraConfig", {"r": 8}),
    "road": ("RoadConfig", {}),
    "hira": ("HiraConfig", {"r": 4}),
    "miss": ("MissConfig", {"r": 4}),
    "unilora": ("UniLoraConfig", {"r": 4}),
    "c3a": ("C3AConfig", {"block_size": 16}),
    "hra": ("HRAConfig", {"r": 4}),
    "deft": ("DeftConfig", {"r": 4}),
    "waveft": ("WaveFTConfig", {"n_frequency": 20}),
    "fourier": ("FourierFTConfig", {"n_frequency": 20}),
    "peanut": ("PeanutConfig", {}),
    "shira": ("ShiraConfig", {"r": 4}),
    "delora": ("DeloraConfig", {"r": 4}),
    "loha": ("LoHaConfig", {"r": 4}),
    "lokr": ("LoKrConfig", {"r": 4}),
}


def net_of(model: nn.Module) -> Any:
    return model.base_model.model if hasattr(model, "base_model") else model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def off(found: Any, expected: Any) -> float:
    """Relative difference."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if found.shape != expected.shape:
        return float("inf")
    size = float(expected.norm())
    difference = float((found - expected).norm()) / (size or 1.0)
    return difference if difference == difference else float("inf")
