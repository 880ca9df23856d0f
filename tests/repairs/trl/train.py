"""Worker of test_train_step.py: ``train.py TRAINER BITS [dora] [completion] [packing] [unpatched]``.

QLoRA (or INT8 LoRA) with TRL's trainers as users write it, checkpointed: four steps in eager, then the same four from
the same state compiled. With the patches a graph that is not whole is an error. Prints what came out as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAINER, BITS, *OPTIONS = sys.argv[1:]
if "unpatched" not in OPTIONS:
    os.environ["ACCELERATE_DYNAMO_USE_FULLGRAPH"] = "1"  # what `accelerate config` writes for "use fullgraph"

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import patches

TEXT = [
    f"{n} times {n + 1} is {n * (n + 1)}, and that is {'even' if n % 3 else 'a multiple of three'}." for n in range(12)
]


def save(folder: Path) -> None:
    """A tiny Llama whose tokens are bytes."""
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)


def quantization() -> BitsAndBytesConfig:
    if BITS == "8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip


def dataset() -> Dataset:
    if TRAINER == "dpo":
        rows = [{"prompt": text[:12], "chosen": text[12:], "rejected": text[:11:-1]} for text in TEXT]
    elif "completion" in OPTIONS:
        rows = [{"prompt": text[:12], "completion": text[12:]} for text in TEXT]
    else:
        rows = [{"text": text} for text in TEXT]
    return Dataset.from_list(rows)


def train(folder: Path, compiled: bool) -> dict[str, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization(), dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    common: dict[str, Any] = dict(
        output_dir=str(folder / "out"), max_steps=4, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-3,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, torch_compile=compiled,
        torch_compile_backend="aot_eager" if compiled else None, report_to=[], use_cpu=True, bf16=False, max_length=64,
        save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    if "packing" not in OPTIONS:
        common["pad_to_multiple_of"] = 64
    if TRAINER == "dpo":
        arguments, trainer_class = DPOConfig(**common), DPOTrainer
    else:
        if "completion" in OPTIONS:
            common["completion_only_loss"] = True
        arguments, trainer_class = SFTConfig(packing="packing" in OPTIONS, **common), SFTTrainer
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=dataset(), processing_class=ByT5Tokenizer(extra_ids=0),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora="dora" in OPTIONS),
    )  # fmt: skip
    trainer.train()
    steps = [row for row in trainer.state.log_history if "loss" in row]
    return {name: [row[name] for row in steps] for name in ("loss", "grad_norm")}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    if "unpatched" not in OPTIONS:
        patches.apply()
    folder = Path(tempfile.mkdtemp())
    save(folder)
    eager = train(folder, compiled=False)
    counters.clear()
    compiled = train(folder, compiled=True)
    print(json.dumps({"eager": eager, "compiled": compiled, "graphs": counters["stats"]["unique_graphs"]}))
