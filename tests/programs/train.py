"""Worker of test_trainer.py, started by ``accelerate launch``: ``train.py OUT MODEL BITS [FORMER]``.

QLoRA (BITS has a 4) and INT8 LoRA (an 8) with the Trainer as users write it: compiled, checkpointed, with dropout,
evaluated and saved on the way; resumed from step 3 of the launch that wrote the folder FORMER, if it is given.
Afterwards the adapters are merged, saved and loaded again. Writes ``OUT/answer.json``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments

import patches

STEPS = 6


def quantization(bits: str) -> BitsAndBytesConfig:
    if bits == "8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip


class Counter(TrainerCallback):
    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


def load(path: str, bits: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=quantization(bits)
    )


def texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 128, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(bits: str, answer: dict[str, Any]) -> PeftModel:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = load(MODEL, bits)
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(3)
    lora = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    arguments = TrainingArguments(
        output_dir=str(OUT / bits), max_steps=STEPS, learning_rate=1e-2, per_device_train_batch_size=2, seed=11,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        torch_compile=True, torch_compile_backend="aot_eager", use_cpu=True,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3, logging_steps=1,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=texts(8, 0), eval_dataset=texts(2, 1))
    trainer.add_callback(counter := Counter())
    trainer.train(resume_from_checkpoint=str(FORMER / bits / "checkpoint-3") if FORMER else None)
    answer["steps here"] = counter.steps
    history = trainer.state.log_history
    answer["losses"] = {row["step"]: row["loss"] for row in history if "loss" in row}
    answer["eval losses"] = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    answer["distributed"] = str(trainer.accelerator.distributed_type)
    answer["compiled graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trainer.save_model(str(OUT / bits / "adapter"))
    return model


def finish(bits: str, model: PeftModel, answer: dict[str, Any]) -> None:
    ids = torch.stack([row["input_ids"] for row in texts(2, 1)])

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits.float()

    trained = logits(model)
    again = logits(PeftModel.from_pretrained(same_casts(load(MODEL, bits)), str(OUT / bits / "adapter")))
    answer["adapter loaded again"] = error(again, trained)
    answer["base"] = error(logits(load(MODEL, bits)), trained)
    merged = model.merge_and_unload()
    answer["merged"] = error(expected := logits(merged), trained)
    merged.save_pretrained(str(OUT / bits / "merged"))
    loaded = AutoModelForCausalLM.from_pretrained(str(OUT / bits / "merged"), device_map={"": "cpu"})
    answer["merged is quantized"] = loaded.is_quantized
    answer["merged loaded again"] = error(logits(same_casts(loaded)), expected)


def same_casts(model: torch.nn.Module) -> torch.nn.Module:
    """Norms, embeddings and heads in float32, as they were while training."""
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def main() -> None:
    logging.disable(logging.INFO)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answers: dict[str, Any] = {"launched by accelerate": "ACCELERATE_DYNAMO_BACKEND" in os.environ}
    answers["applied"] = [r.id for r in patches.report().with_status(patches.Status.APPLIED)]
    try:
        for bits in sys.argv[3]:
            answer = answers[bits] = {}
            finish(bits, train(bits, answer), answer)
    finally:
        (OUT / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    OUT, MODEL = Path(sys.argv[1]), sys.argv[2]
    FORMER = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    main()
