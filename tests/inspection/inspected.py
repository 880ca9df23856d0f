"""Tiny models, loaded, offloaded and wrapped as users do, for :mod:`.test_inspection` and its neighbour."""

from __future__ import annotations

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

import patches
from patches.inspection.records import Problem

IDS = torch.arange(8).view(1, 8)
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(layers: int = 2, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=layers, use_cache=False, **SIZE, **options))


def moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, num_hidden_layers=2, **SIZE, **experts))


@cache
def saved(kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of "llama", "tied" or "moe"."""
    folder = Path(tempfile.mkdtemp())
    model = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "moe": moe}[kind]()
    model.to(dtype).save_pretrained(folder)
    return folder


def load(bits: int, kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if bits == 4:
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, **options}
    else:
        options = {"load_in_8bit": True, **options}
    config = BitsAndBytesConfig(**options)
    folder = saved(kind, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map={"": "cpu"})


def lora(model: Any, **options: Any) -> Any:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], **options}))


def dispatched(model: Any) -> Any:
    """The second layer on the disk, the head in CPU memory; both run on the CPU."""
    import accelerate

    map_ = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    folder = tempfile.mkdtemp()
    accelerate.dispatch_model(
        model, {**map_, "model.layers.1": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    )
    return model


def offloaded(model: Any) -> Any:
    import accelerate

    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def loss(model: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=IDS, labels=IDS).loss


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def only(model: Any, optimizer: Any = None) -> Problem:
    """The one problem that it has."""
    (problem,) = patches.inspect(model, optimizer).facts.problems
    assert problem.what in str(patches.inspect(model, optimizer)).replace("\n    ", " ")
    return problem


def fine(model: Any, optimizer: Any = None) -> bool:
    """It has none."""
    return patches.inspect(model, optimizer).facts.problems == ()
