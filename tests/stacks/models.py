"""The tiny Llama of the flows: on disk, loaded, under LoRA, offloaded; and what is asked of it."""

from __future__ import annotations

import tempfile
from typing import Any

IDS = list(range(12))


def save_base(folder: str, **options: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config = LlamaConfig(**size, num_key_value_heads=2, num_hidden_layers=2, use_cache=False, **options)
    LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: str, kind: str | None, skip: list[str] | None = None, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    left = {"llm_int8_skip_modules": skip} if skip else {}
    if kind == "4-bit":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **left
        )
    elif kind == "INT8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, **left)
    options = {"device_map": "cpu", "torch_dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def dispatched(folder: str, kind: str | None) -> Any:
    """Loaded by a device map: half of the layers on the disk."""
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    return load(folder, kind, device_map=places, offload_folder=tempfile.mkdtemp())


def config(names: tuple[str, ...] = ("q_proj", "down_proj"), **options: Any) -> Any:
    import torch
    from peft import LoraConfig

    torch.manual_seed(1)
    return LoraConfig(r=4, target_modules=list(names), init_lora_weights=False, task_type="CAUSAL_LM",
                      lora_dropout=0.0, **options)  # fmt: skip


def lora(model: Any, **options: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(model, config(**options))


def trained(model: Any) -> list[Any]:
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]


def ids() -> Any:
    import torch

    return torch.tensor(IDS)[None]


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=ids()).logits.float()


def gradients(model: Any) -> list[Any]:
    model.train()
    model(input_ids=ids(), labels=ids()).loss.backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    assert found and all(each is not None for each in found), "some of the adapter has no gradient"
    return found


def distance(one: list[Any], other: list[Any]) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other))


def half_offloaded(model: Any) -> Any:
    import torch
    from accelerate import cpu_offload, disk_offload

    first, second = model.model.layers
    cpu_offload(first, execution_device=torch.device("cpu"))
    disk_offload(second, tempfile.mkdtemp(), execution_device=torch.device("cpu"))
    return model
