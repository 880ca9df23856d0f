"""Three things that people do with quantized models, as they write them: nothing here knows of a plugin.

    python examples/finetune.py FOLDER      # of a checkpoint; prints one JSON line for each

`make demo` runs this program twice, with the plugin and without it, and compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401  (with bnb-patches installed, this import is all that a program needs)
import torch
from common import DEVICE, batches, fast_dtype, quiet
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LongT5Config, LongT5ForConditionalGeneration

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=fast_dtype())
CHECKPOINTING = {"use_reentrant": False}
MEMORY = {torch.device(DEVICE).index if DEVICE != "cpu" else "cpu": "1400KB"}  # of 2.2 MB
STEPS = 16
Figures = dict[str, Any]


def does_not_fit(folder: Path) -> Figures:
    """LoRA on a model that is larger than the memory given to it: train, save the adapter, load it again."""
    model = half_on_disk(folder)
    away, total = megabytes(p for p in model.parameters() if p.is_meta), megabytes(model.parameters())
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=CHECKPOINTING)
    model = get_peft_model(model, LORA).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    samples, losses, start = batches(2, DEVICE), [], time.process_time()
    for _ in range(STEPS):
        batch = next(samples)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = (time.process_time() - start) / STEPS
    adapter = folder.parent / tempfile.mktemp(prefix="adapter-", dir="")
    model.save_pretrained(adapter)
    whole = four_bit(folder, device_map={"": DEVICE})
    again, whole = (PeftModel.from_pretrained(base, adapter) for base in (half_on_disk(folder), whole))
    with torch.no_grad():
        difference = float((again(batch).logits - whole(batch).logits).abs().max())
    few = STEPS // 4
    return {
        "first": sum(losses[:few]) / few,
        "last": sum(losses[-few:]) / few,
        "steps": STEPS,
        "seconds": seconds,
        "away": away,
        "total": total,
        "difference": difference,
    }


def half_on_disk(folder: Path) -> Any:
    """The checkpoint in ``folder`` in 4 bits, of which ``max_memory`` leaves about half on disk."""
    return four_bit(folder, device_map="auto", max_memory=MEMORY, offload_folder=tempfile.mkdtemp(dir=folder.parent))


def four_bit(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4, dtype=fast_dtype(), **options)


def compiled(folder: Path) -> Figures:
    """The first step of 4-bit QLoRA with gradient checkpointing, compiled: graphs, breaks, seconds."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, num_hidden_layers=2, quantization_config=NF4, device_map={"": DEVICE}
    )
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=CHECKPOINTING)
    model = get_peft_model(model, LORA).train()
    batch = next(batches(2, DEVICE))
    counters.clear()
    start = time.process_time()
    torch.compile(model, backend="aot_eager")(input_ids=batch, labels=batch).loss.backward()
    seconds = time.process_time() - start
    return {
        "graphs": counters["stats"].get("unique_graphs", 0),
        "breaks": sum(counters["graph_break"].values()),
        "seconds": seconds,
    }


def four_bit_t5(folder: Path) -> Figures:
    """How far the outputs of a LongT5 in 4 bits are from those of the same one in full precision."""
    torch.manual_seed(0)
    config = LongT5Config(vocab_size=384, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2)
    model = LongT5ForConditionalGeneration(config)
    model.save_pretrained(folder.parent / "t5")
    quantized = LongT5ForConditionalGeneration.from_pretrained(
        folder.parent / "t5", quantization_config=NF4, device_map={"": DEVICE}
    )
    tokens = next(batches(2, DEVICE))
    with torch.no_grad():
        right = model.to(DEVICE).eval()(input_ids=tokens, decoder_input_ids=tokens).logits
        logits = quantized(input_ids=tokens, decoder_input_ids=tokens).logits
    return {"off": float((logits - right).norm() / right.norm())}


def megabytes(parameters: Any) -> float:
    return sum(p.nbytes for p in parameters) / 1e6


TASKS: dict[str, Callable[[Path], Figures]] = {
    "does_not_fit": does_not_fit,
    "compiled": compiled,
    "four_bit_t5": four_bit_t5,
}


def main(folder: Path) -> None:
    quiet()
    for name, task in TASKS.items():
        try:
            figures = task(folder)
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
        print(json.dumps({"task": name, **figures}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
