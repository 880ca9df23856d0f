"""Tiny mixtures of experts in 4 bits, from a checkpoint as transformers 4 wrote it or from ``from_pretrained``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tiny_models import in_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "float32",
}


def save_as_transformers_4(folder: str) -> torch.Tensor:
    """Save a Qwen3-MoE of one layer, and return the values of its packed ``gate_up_proj``."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32)
    config = Qwen3MoeConfig(
        vocab_size=16, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    values = pack_checkpoint(Path(folder))
    name = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    experts = [torch.cat([values[name.format(i, kind)] for kind in ("gate", "up")]) for i in range(4)]
    return torch.stack(experts)


def pack_checkpoint(folder: Path, double: bool = False, config: dict[str, Any] = NF4) -> dict[str, torch.Tensor]:
    """Quantize a checkpoint to 4 bits, matrix by matrix, and return the values of its packed weights by name."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def packed(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        data, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
        statistics = {f"{name}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        return {name: data, **statistics}, dequantize_4bit(data, state)

    return repack_checkpoint(folder, packed, {**config, "bnb_4bit_use_double_quant": double})


def repack_checkpoint(
    folder: Path,
    packed: Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
    config: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Do as ``pack_checkpoint``, with any quantization: ``packed`` returns the entries of a weight, and its values."""
    from safetensors.torch import load_file, save_file

    file, values = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            entries, values[name] = packed(name, weight)
            tensors.update(entries)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(stored))
    return values


def load_mixture_in_4bit() -> PreTrainedModel:
    """Save a tiny Qwen3-MoE in bfloat16 and load it in 4 bits."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig

    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
    config = Qwen3MoeConfig(vocab_size=32, num_key_value_heads=2, **sizes, **experts)
    kind = AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        kind.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model: PreTrainedModel = kind.from_pretrained(
            folder, quantization_config=nf4, **in_dtype(torch.bfloat16), device_map={"": "cpu"}
        )
    return model
