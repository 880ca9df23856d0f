"""A tiny Llama on disk, loaded over the device; LoRA on it; and two trained models compared.

What a flow looks like::

    folder = save_llama(tmp_path / "base")
    whole = train(add_lora(load(folder, "nf4", {"": device})), device)
    split = train(add_lora(load(folder, "nf4", half(device, "cpu"))), device)
    assert_same_training(split, whole)
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from patches.repairs.reproducers.tiny_models import in_dtype
from tests.device.layers import difference

Place = str | int | torch.device
KINDS = ("plain", "int8", "nf4", "nf4-nested")
QUANTIZED = KINDS[1:]
VOCABULARY = 64


def save_llama(folder: Path, layers: int = 2, hidden: int = 64, **config: Any) -> Path:
    """A Llama in bfloat16, always the same, with outlier features for INT8; its folder."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.06,
            use_cache=False,
            **{"intermediate_size": 2 * hidden, **config},
        )  # fmt: skip
    )
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[3] = 20.0
        layer.post_attention_layernorm.weight.data[7] = 20.0
    with _quiet():
        model.bfloat16().save_pretrained(folder)
    return folder


def quantization(kind: str, **options: Any) -> BitsAndBytesConfig | None:
    """The configuration that a user gives to transformers."""
    if kind == "plain":
        return None
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **options)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind[:3], bnb_4bit_use_double_quant=kind.endswith("nested"),
        bnb_4bit_compute_dtype=torch.bfloat16, **options,
    )  # fmt: skip


def load(
    folder: Path, kind: str, device_map: dict[str, Place], quantized: dict[str, Any] | None = None, **options: Any
) -> torch.nn.Module:
    """The model in ``folder`` as ``kind``, on ``device_map``; ``quantized`` goes to the configuration."""
    config = quantization(kind, **(quantized or {}))
    if config is not None:
        options["quantization_config"] = config
    with _quiet():
        return AutoModelForCausalLM.from_pretrained(
            folder, device_map=device_map, **in_dtype(torch.bfloat16), attn_implementation="eager", **options
        )


def half(device: Place, rest: Place, layers: int = 2) -> dict[str, Place]:
    """A device map: all on ``device`` but the second half of the decoder layers, which is on ``rest``."""
    outside = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    inside = {f"model.layers.{i}": device if i < layers // 2 else rest for i in range(layers)}
    return {**dict.fromkeys(outside, device), **inside}


def add_lora(model: torch.nn.Module, checkpointing: bool | None = None, **config: Any) -> torch.nn.Module:
    """LoRA on all linear layers, trained a little already; ``checkpointing`` is ``use_reentrant``, None for none."""
    if checkpointing is not None:
        how = {"use_reentrant": checkpointing}
        if any(quantized_layers(model)):
            model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=how)
        else:
            model.gradient_checkpointing_enable(how)
            model.enable_input_require_grads()
    torch.manual_seed(1)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(model, LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, behind which the adapter would have no part in the first step
            parameter.data.copy_(0.02 * torch.randn(parameter.shape))
    return model.train()


def quantized_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of bitsandbytes in a model."""
    return (m for m in model.modules() if isinstance(m, (bnb.nn.Linear8bitLt, bnb.nn.Linear4bit)))


def batch(device: Place, seed: int = 2) -> torch.Tensor:
    """Tokens, which are their own labels."""
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed)).to(device)


@torch.no_grad()
def logits(model: torch.nn.Module, device: Place) -> torch.Tensor:
    """Of the tokens of :func:`batch`, on the host."""
    return model.eval()(input_ids=batch(device)).logits.cpu()


@dataclass
class Trained:
    """What training gave, all on the host: loss and gradients of every step, and the parameters at the end."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def train(model: torch.nn.Module, device: Place, steps: int = 2) -> Trained:
    """Some steps by hand, each with other tokens."""
    trained, found = {n: p for n, p in model.named_parameters() if p.requires_grad}, Trained()
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    for seed in range(steps):
        tokens = batch(device, seed)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.losses.append(loss.detach().cpu())
        found.gradients.append({n: p.grad.cpu().clone() for n, p in trained.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {n: p.detach().cpu().clone() for n, p in trained.items()}
    return found


def assert_same_training(one: Trained, other: Trained) -> None:
    """Losses, gradients and trained parameters are the same to the bit; the error says which are not."""
    assert one.parameters.keys() == other.parameters.keys(), "other parameters were trained"
    assert [g.keys() for g in one.gradients] == [g.keys() for g in other.gradients], "other parameters got a gradient"
    assert all(g.keys() == one.parameters.keys() for g in one.gradients), "a parameter got no gradient"
    pairs = [(f"loss {i}", *both) for i, both in enumerate(zip(one.losses, other.losses, strict=True))]
    for i, (mine, theirs) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        pairs += [(f"gradient {i} of {name}", mine[name], theirs[name]) for name in mine]
    pairs += [(name, one.parameters[name], other.parameters[name]) for name in one.parameters]
    wrong = [f"{name}: {difference(a, b):.1e} off" for name, a, b in pairs if not torch.equal(a, b)]
    assert not wrong, f"{len(wrong)} of {len(pairs)} differ:\n" + "\n".join(wrong[:10])


def assert_too_large(call: Callable[[], object]) -> None:
    """``call`` needs more memory than the device has; while it loads, transformers calls that a failed conversion."""
    with pytest.raises(RuntimeError, match="out of memory|during automatic conversion"):
        call()
    gc.collect()  # what the traceback kept


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars."""
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
