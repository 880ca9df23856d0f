"""Flows of a mixture of experts in 4 bits, a tiny Qwen3-MoE: how much is packed, outputs, LoRA, saving."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.stacks import jobs, models

SIZE = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "use_cache": False,
}  # fmt: skip


def packed() -> jobs.Flow:
    """1 if the parameters take more bytes than two for each value of its experts, as in floating point it does."""

    def run(folder: str) -> float:
        with _quantized() as model:
            return 0.0 if _is_packed(model) else 1.0

    return run


def _is_packed(model: Any) -> bool:
    values = 2 * SIZE["num_experts"] * 3 * SIZE["hidden_size"] * SIZE["moe_intermediate_size"]
    return sum(each.nbytes for each in model.parameters()) < 2 * values


def outputs() -> jobs.Flow:
    """The outputs, against those of the same model dequantized."""

    def run(folder: str) -> float:
        with _quantized() as model:
            found = models.logits(model)
            error = models.distance([found], [models.logits(model.dequantize())])
            return 0.0 if error < 1e-5 else error

    return run


def trained() -> jobs.Flow:
    """The gradients of LoRA on attention with gradient checkpointing, against those without."""

    def run(folder: str) -> float:
        import peft

        found = []
        for checkpointing in (True, False):
            with _quantized() as model:
                options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if checkpointing else {}
                peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing, **options)
                found.append(models.gradients(models.lora(model, names=("q_proj", "o_proj"))))
        return models.distance(*found)

    return run


def saved() -> jobs.Flow:
    """Saved quantized, and loaded again; 1 if the experts that are saved are in floating point."""

    def run(folder: str) -> float:
        with _quantized() as model, tempfile.TemporaryDirectory() as again:
            if not _is_packed(model):
                return 1.0
            model.save_pretrained(again)
            return models.distance([models.logits(models.load(again, None))], [models.logits(model)])

    return run


@contextlib.contextmanager
def _quantized() -> Iterator[Any]:
    """Loaded in 4 bits. Of transformers 5 the plugin is asked for experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import patches
    from patches.engine import gate

    torch.manual_seed(0)
    asks = gate.satisfied("transformers>=5") and bool(patches.report().with_status(patches.Status.APPLIED))
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE)).save_pretrained(folder)
        with patches.quantize_experts() if asks else contextlib.nullcontext():
            model = models.load(folder, "4-bit")
        yield model
