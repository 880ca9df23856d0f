"""The tiny Llama that the healthy programs use, and how they train and call it."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from ..repairs.reproducers.quantized_models import load_quantized
from ..repairs.reproducers.tiny_models import in_dtype, make_llama

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

SIZE = {"vocab_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 1}
"""Widths are multiples of 64, the block size of 4-bit weights: else the CPU reads wrong scales, which a patch repairs."""


def plain_llama() -> PreTrainedModel:
    """Make a Llama of two layers, in float32, after setting the seed."""
    return make_llama(**SIZE)


def llama_4bit(**options: Any) -> Any:
    """Load such a Llama in nf4 on the CPU; ``options`` are for its BitsAndBytesConfig, the compute dtype is float32."""
    import torch
    from transformers import BitsAndBytesConfig

    how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32, **options}
    return _on_cpu(BitsAndBytesConfig(load_in_4bit=True, **how))


def llama_int8() -> Any:
    """Load such a Llama in INT8 on the CPU."""
    from transformers import BitsAndBytesConfig

    return _on_cpu(BitsAndBytesConfig(load_in_8bit=True))


def _on_cpu(how: Any) -> Any:
    import torch

    return load_quantized(plain_llama(), how, device_map={"": "cpu"}, **in_dtype(torch.float32))


def token_ids() -> Tensor:
    """Return two rows of eight token ids."""
    import torch

    return torch.arange(16).view(2, 8)


def logits_of(model: Module) -> Tensor:
    """Call ``model`` in eval mode, without gradients."""
    import torch

    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=token_ids()).logits
    return logits


def train_two_steps(model: Module, optimizer: Any = None) -> list[Any]:
    """Take two steps, by default of AdamW; return each loss, the gradients of the last step and what was trained."""
    import torch

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = optimizer or torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    torch.manual_seed(2)  # for dropout
    for _ in range(2):
        optimizer.zero_grad()
        loss = model.train()(input_ids=token_ids(), labels=token_ids()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [losses, {name: parameter.grad for name, parameter in trained.items()}, trained]


def with_lora(model: Any, **options: Any) -> Any:
    """Put LoRA that is not zero, with dropout, on projections of attention and MLP; ``options`` are for its LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model

    projections = ["q_proj", "v_proj", "down_proj"]
    usual = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": projections, "init_lora_weights": False}
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{**usual, **options}))


def saved_and_loaded_adapter(model: Any, base: Any) -> Any:
    """Save the adapter of ``model``, and load it onto ``base``."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_embedding_layers=False)  # by default peft may ask the Hub about the base
        return PeftModel.from_pretrained(base, folder)
