"""The models, the ways to ask for them, and the product of both."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {"vocab_size": 32, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}


def _llama(**also: Any) -> Any:
    return transformers.LlamaConfig(vocab_size=32, **{**SIZE, "num_hidden_layers": 11, **also})


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=32, **SIZE)
    text = transformers.LlamaConfig(vocab_size=32, **SIZE)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)


def _whisper() -> Any:
    sides = {f"{side}_{what}": value for side in ("encoder", "decoder")
             for what, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))}  # fmt: skip
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    positions = {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8}
    return transformers.WhisperConfig(vocab_size=32, d_model=32, **sides, **marks, **positions)


MODELS = {
    "llama": ("LlamaForCausalLM", _llama),
    "llama tied": ("LlamaForCausalLM", lambda: _llama(num_hidden_layers=2, tie_word_embeddings=True)),
    "gpt_neox": ("GPTNeoXForCausalLM", lambda: transformers.GPTNeoXConfig(vocab_size=32, **SIZE)),
    "gpt2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2)),
    "llava": ("LlavaForConditionalGeneration", _llava),
    "t5": ("T5ForConditionalGeneration", lambda: transformers.T5Config(**SEQ2SEQ)),
    "longt5": ("LongT5ForConditionalGeneration", lambda: transformers.LongT5Config(**SEQ2SEQ)),
    "whisper": ("WhisperForConditionalGeneration", _whisper),
}
SKIPS: dict[str, list[str | None]] = {
    "llama": [None, "mlp", "layers.1", "model.layers.1", "self_attn.q_proj", "q_proj"],
    "llama tied": [None, "mlp", "layers.1", "self_attn.o_proj"],
    "gpt_neox": [None, "mlp", "layers.0", "attention.dense"],
    "gpt2": [None, "attn", "h.1", "mlp.c_fc"],
    "llava": [None, "vision_tower", "multi_modal_projector", "layers.0.mlp", "model.vision_tower"],
    "t5": [None, "decoder", "block.0", "SelfAttention.q"],
    "longt5": [None, "decoder", "DenseReluDense"],
    "whisper": [None, "encoder", "self_attn", "fc1"],
}
"""Names that exclude something; None gives no list."""
HOW = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "int8": {"load_in_8bit": True},
}
CHECKPOINTS = ("plain", "packed", "other list")
"""Quantized while it is loaded; saved quantized and loaded; the same with a list that another version wrote."""
DTYPES = ("float16", "bfloat16", "float32")
ELSEWHERE = ["language_model.model.layers.0", "no.such.module"]
"""Names that another version has for what is not there."""


class Program(NamedTuple):
    model: str
    skip: str | None
    how: str
    checkpoint: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.model} without {self.skip or 'a list'}, {self.how}, {self.checkpoint}, {self.dtype}"


def everything() -> Iterator[Program]:
    """The whole product."""
    for name, skips in SKIPS.items():
        yield from (Program(name, *rest) for rest in itertools.product(skips, HOW, CHECKPOINTS, DTYPES))


def some(count: int, seed: int = 0) -> list[Program]:
    """``count`` programs, each model among them."""
    found = list(everything())
    random.Random(seed).shuffle(found)
    first = {program.model: program for program in reversed(found)}
    return list(dict.fromkeys([*first.values(), *found]))[:count]


class Loaded(NamedTuple):
    """A model as a user gets it, and what it should be like."""

    model: Any
    original: Any
    """The model in floating point that it was made from."""
    saved: Any
    """The quantized model that the checkpoint was saved from; None if there is none."""


def run(program: Program, folder: Path) -> Loaded:
    """What a user does: load a checkpoint from disk, quantized as asked; ``folder`` keeps what was saved."""
    name, make = MODELS[program.model]
    kind = getattr(transformers, name)
    plain = folder / program.model.replace(" ", "_")
    if not plain.exists():
        torch.manual_seed(0)
        kind(make()).save_pretrained(plain)
    list_ = (
        {} if program.skip is None else {"llm_int8_skip_modules": [program.skip, "lm_head", "proj_out", "embed_out"]}
    )
    asked = transformers.BitsAndBytesConfig(**HOW[program.how], **list_)
    dtype = getattr(torch, program.dtype)
    original = kind.from_pretrained(plain, torch_dtype=dtype).eval()
    if program.checkpoint == "plain":
        return Loaded(_load(kind, plain, dtype, quantization_config=asked), original, None)
    saved = _load(kind, plain, torch.bfloat16, quantization_config=asked)
    packed = folder / str(program).replace(" ", "_").replace(",", "")
    saved.save_pretrained(packed)
    if program.checkpoint == "other list":
        file = packed / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"]["llm_int8_skip_modules"] = ELSEWHERE
        file.write_text(json.dumps(config))
    return Loaded(_load(kind, packed, dtype), original, saved)


def _load(kind: Any, folder: Path, dtype: torch.dtype, **also: Any) -> Any:
    return kind.from_pretrained(folder, torch_dtype=dtype, device_map="cpu", **also).eval()
