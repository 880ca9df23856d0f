"""Worker of test_fsdp2_trainer.py, one process a rank: ``fsdp2_trainer.py OUT MODEL [--resume FORMER] KIND...``.

Kinds are ``nf4`` and ``int8``, and these with ``-8bit``, for an optimizer of bitsandbytes. ``--resume`` goes on from step 2 of
what other ranks wrote to the folder ``FORMER``.

QLoRA and INT8 LoRA with the Trainer and ``fsdp``: trained, saved, and resumed from the middle, with state dicts of
both kinds. Writes ``OUT/<rank>.json``.

accelerate shards where it finds several accelerators, and not on CPUs. Before the Trainer makes its Accelerator these
ranks say that they are such; from there on accelerate and transformers do all that they do on GPUs, over gloo.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from bitsandbytes import optim  # noqa: F401  # with this import the entry point runs
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
ROWS = [{name: (torch.arange(12) * (i + 3)) % 128 for name in ("input_ids", "labels")} for i in range(8)]


def load(kind: str, model: Path) -> Any:
    """In float32, with codes stored as float32, as FSDP wants them to lie with what else it shards."""
    dtype = torch.float32
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )  # fmt: skip
    config = four_bit if kind == "nf4" else BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map={"": "cpu"}, quantization_config=config)


def train(kind: str, model: Path, out: Path, state_dict: str = "", resume: Path | None = None) -> Trainer:
    """Four steps of two rows; with ``state_dict``, its kind, sharded over the ranks. Resumed after the two of ``resume``."""
    ranks = int(os.environ["WORLD_SIZE"]) if state_dict else 1
    fsdp: dict[str, Any] = {}
    if state_dict:
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": state_dict}
        fsdp = {
            "fsdp": "full_shard auto_wrap", "fsdp_config": {**wrapped, "cpu_ram_efficient_loading": False}
        }  # fmt: skip
    arguments = TrainingArguments(
        str(out), max_steps=4, learning_rate=1e-2, per_device_train_batch_size=2 // ranks, seed=11,
        save_strategy="steps", save_steps=2, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_bnb_8bit" if kind.endswith("-8bit") else "adamw_torch", **fsdp,
    )  # fmt: skip
    if state_dict and arguments.device.type == "cpu":  # asked for the device, the arguments have made the state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    base = load(kind.removesuffix("-8bit"), model)
    base.config.use_cache = False
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(3)
    rank = 64 if kind.endswith("-8bit") else 4  # smaller parameters have optimizer states of 32 bits
    adapted = get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    adapted.enable_input_require_grads()
    trainer = Trainer(adapted, arguments, train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=str(resume / "checkpoint-2") if resume else None)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.stack([row["input_ids"] for row in ROWS[:2]])).logits


def run(kind: str, model: Path, out: Path, state_dict: str) -> dict[str, Any]:
    trainer = train(kind, model, out, state_dict)
    state = trainer.accelerator.state
    answer = {
        "distributed": f"{state.distributed_type}, version {state.fsdp_plugin.fsdp_version}",
        "parameters": sorted({type(p.data).__name__ for p in trainer.model.parameters()}),
        "losses": losses(trainer),
    }
    trained = logits(trainer.model)
    state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # as peft's recipe does: shards are not saved as a model
    trainer.save_model(str(out / "adapter"))
    trainer.accelerator.wait_for_everyone()
    again = PeftModel.from_pretrained(load(kind.removesuffix("-8bit"), model), str(out / "adapter"))
    answer["adapter loaded again"] = float((logits(again) - trained).abs().max() / trained.abs().max())
    answer["resumed"] = losses(train(kind, model, out, state_dict, resume=out))
    return answer


def trained_or_resumed(kind: str, options: argparse.Namespace, at: Path, state_dict: str) -> dict[str, Any]:
    if not options.resume:
        return run(kind, options.model, options.out / at, state_dict)
    return {"losses": losses(train(kind, options.model, options.out / at, state_dict, options.resume / at))}


def main(answer: Callable[[str, argparse.Namespace, Path, str], dict[str, Any]] = trained_or_resumed) -> None:
    """Write what ``answer`` says of each kind and each kind of state dict, which it writes to ``options.out / at``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    answers: dict[str, dict[str, Any]] = {kind: {} for kind in options.kinds}
    for kind, state_dict in product(options.kinds, STATE_DICTS):
        answers[kind][state_dict] = answer(kind, options, Path(kind) / state_dict, state_dict)
    (options.out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
