"""Tiny models under the names that peft's tests ask the Hub for, in a folder laid out as the cache of huggingface_hub.

Nothing is downloaded: each model is built from its configuration with random weights, and the libraries read it as they
read any model of the cache without a network (``HF_HUB_OFFLINE=1``). A test that asks for another model fails with the
plugin and without it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
FEW_HEADS: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
# Whole blocks of 64 values: before 0.50 a CPU takes nothing else.
OPT: dict[str, Any] = {
    **{
        key: SMALL[key] for key in ("vocab_size", "num_attention_heads", "max_position_embeddings", "num_hidden_layers")
    },
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
}
BART: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 32,
    "max_position_embeddings": 128,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
}
T5: dict[str, Any] = {"vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
GPT2: dict[str, Any] = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPTJ: dict[str, Any] = {**GPT2, "rotary_dim": 4}
BLOOM: dict[str, Any] = {"vocab_size": 512, "hidden_size": 32, "n_layer": 2, "n_head": 4}
MIXTRAL: dict[str, Any] = {**FEW_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}

_INTERNAL, _HF, _TRL = "peft-internal-testing", "hf-internal-testing", "trl-internal-testing"
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    f"{_INTERNAL}/opt-125m": ("OPTForCausalLM", {**OPT, "num_hidden_layers": 12}),
    "facebook/opt-125m": ("OPTForCausalLM", {**OPT, "num_hidden_layers": 12}),
    f"{_INTERNAL}/tiny-random-OPTForCausalLM": ("OPTForCausalLM", OPT),
    f"{_INTERNAL}/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", GPT2),
    f"{_INTERNAL}/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    f"{_HF}/tiny-random-gpt2": ("GPT2LMHeadModel", GPT2),
    f"{_INTERNAL}/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", GPTJ),
    f"{_INTERNAL}/tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", SMALL),
    f"{_INTERNAL}/tiny-random-BloomForCausalLM": ("BloomForCausalLM", BLOOM),
    f"{_TRL}/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", FEW_HEADS),
    f"{_INTERNAL}/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", FEW_HEADS),
    f"{_HF}/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", FEW_HEADS),
    f"{_HF}/tiny-random-MistralForCausalLM": ("MistralForCausalLM", FEW_HEADS),
    f"{_HF}/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", FEW_HEADS),
    f"{_HF}/Mixtral-tiny": ("MixtralForCausalLM", MIXTRAL),
    f"{_TRL}/tiny-GptOssForCausalLM": ("GptOssForCausalLM", MIXTRAL),
    f"{_TRL}/tiny-Llama4ForCausalLM": ("Llama4ForCausalLM", {**MIXTRAL, "intermediate_size_mlp": 64}),
    f"{_INTERNAL}/tiny-dummy-qwen2": ("Qwen2ForCausalLM", {**SMALL, "num_key_value_heads": 2}),
    f"{_INTERNAL}/tiny-random-BertModel": ("BertModel", SMALL),
    f"{_INTERNAL}/tiny-random-RobertaModel": ("RobertaModel", SMALL),
    f"{_INTERNAL}/tiny-random-DebertaModel": ("DebertaModel", SMALL),
    f"{_INTERNAL}/tiny-random-DebertaV2Model": ("DebertaV2Model", SMALL),
    f"{_INTERNAL}/tiny-random-BertForSequenceClassification": ("BertForSequenceClassification", SMALL),
    f"{_INTERNAL}/tiny-random-RobertaForSequenceClassification": ("RobertaForSequenceClassification", SMALL),
    f"{_TRL}/tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", FEW_HEADS),
    f"{_INTERNAL}/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", T5),
    f"{_INTERNAL}/tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", T5),
    f"{_INTERNAL}/tiny-random-t5": ("T5ForConditionalGeneration", T5),
    f"{_INTERNAL}/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", BART),
}
"""Names, and the class and configuration that stand for each."""


def build(cache: Path) -> None:
    """Write every model and a tokenizer of bytes for it into ``cache``."""
    import torch
    import transformers

    tokenizer = transformers.ByT5Tokenizer()
    for name, (cls, settings) in MODELS.items():
        torch.manual_seed(0)
        kind = getattr(transformers, cls)
        model = kind(kind.config_class(**settings, pad_token_id=0))
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / ("0" * 40)
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
