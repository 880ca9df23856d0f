"""Worker of test_trainer_ranks.py, one a rank: ``train_ranks.py OUT MODEL BATCH [--compile] [--resume FORMER]``.

4-bit and INT8 LoRA with the Trainer as users write it, ``BATCH`` rows a rank; ``--compile`` compiles the 4-bit one.
Resumed from step 2 of the launch that wrote the folder ``FORMER``, if it is given. Writes ``OUT/<rank>.json``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from train import error, load, same_casts, texts
from transformers import Trainer, TrainingArguments

import patches


def train(options: argparse.Namespace, bits: str) -> dict[str, Any]:
    out = options.out / bits
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if options.compile and bits == "4" else {}
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=4, learning_rate=1e-2, per_device_train_batch_size=options.batch, seed=11,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, use_cpu=True,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, logging_steps=1,
        report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False, **compiled,
    )  # fmt: skip
    states = {result.id: str(result.status) for result in patches.check_ranks()}
    model = load(options.model, bits)
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Trainer(model=model, args=arguments, train_dataset=texts(8, 0), eval_dataset=texts(4, 1))
    checkpoint = str(options.resume / bits / "checkpoint-2") if options.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(out / "adapter"))  # on rank 0
    trainer.accelerator.wait_for_everyone()
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in texts(2, 1)])
        trained = model.eval()(input_ids=ids).logits.float()
        again = PeftModel.from_pretrained(same_casts(load(options.model, bits)), str(out / "adapter")).eval()
        loaded = again(input_ids=ids).logits.float()
    history = trainer.state.log_history
    return {
        "states": states,
        "distributed": str(trainer.accelerator.distributed_type),
        "ranks": trainer.accelerator.num_processes,
        "backend": trainer.accelerator.state.backend,
        "losses": {row["step"]: row["loss"] for row in history if "loss" in row},
        "eval losses": {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row},
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "adapter loaded again": error(loaded, trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answer = {bits: train(options, bits) for bits in ("4", "8")}
    (options.out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
