"""Tiny models on disk, for reproducers that begin with ``from_pretrained``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine.gate import satisfied

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_llama(**also: Any) -> PreTrainedModel:
    """Make a Llama of one layer, in float32; ``also`` goes to its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 16, **SIZE, **also}))


def save_llama(folder: str, **also: Any) -> None:
    """Save such a Llama in ``folder``."""
    make_llama(**also).save_pretrained(folder)


def make_llava() -> PreTrainedModel:
    """Make a Llava, which sees through a CLIP, in float32."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=64, **SIZE)
    text = LlamaConfig(vocab_size=16, **SIZE)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=15))


def save_llava(folder: str) -> None:
    """Save such a Llava in ``folder``."""
    make_llava().save_pretrained(folder)


def load_llama_int8(folder: str, **options: Any) -> Any:
    """Save a Llama to ``folder`` and load it in INT8, float32, on the CPU; ``options`` are for its BitsAndBytesConfig."""
    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    save_llama(folder)
    config = BitsAndBytesConfig(load_in_8bit=True, **options)
    load = {"quantization_config": config, "device_map": "cpu", **in_dtype(torch.float32)}
    return LlamaForCausalLM.from_pretrained(folder, **load)


def in_dtype(dtype: Any) -> dict[str, Any]:
    """Return the keyword that asks ``from_pretrained`` for ``dtype``, as the installed release calls it."""
    return {"dtype" if satisfied("transformers>=4.56") else "torch_dtype": dtype}
