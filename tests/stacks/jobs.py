"""The flows: each is a program of a user, and returns how far its result is from its reference."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stacks import models
from tests.stacks.models import IDS

Flow = Callable[[str], float]


def load(kind: str) -> Flow:
    """The outputs of the model, against the same model with its weights rounded in floating point."""

    def run(folder: str) -> float:
        quantized = models.load(folder, kind)
        plain = models.load(folder, None)
        for (_, dense), (_, layer) in zip(_linears(plain), _linears(quantized)):
            dense.weight.data = _rounded(layer)
        error = models.distance([models.logits(quantized)], [models.logits(plain)])
        return 0.0 if error < (1e-5 if kind == "4-bit" else 0.02) else error  # INT8 rounds activations, too

    return run


def _linears(model: Any) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in model.named_modules() if hasattr(m, "in_features") and "lm_head" not in n]


def _rounded(layer: Any) -> Any:
    import bitsandbytes as bnb

    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    scales = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
    codes = layer.weight.data if layer.state.CB is None else layer.state.CB
    return codes.float() * scales.view(-1, 1) / 127


def saved(kind: str) -> Flow:
    """Saved quantized, and loaded again."""

    def run(folder: str) -> float:
        model = models.load(folder, kind)
        with tempfile.TemporaryDirectory() as again:
            model.save_pretrained(again)
            return models.distance([models.logits(models.load(again, None))], [models.logits(model)])

    return run


def checkpointed(kind: str, dora: bool, reentrant: bool) -> Flow:
    """The gradients of the adapter with gradient checkpointing, against those without."""

    def run(folder: str) -> float:
        from peft import prepare_model_for_kbit_training

        options = {"use_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        model = models.lora(prepare_model_for_kbit_training(models.load(folder, kind), **options), use_dora=dora)
        whole = models.lora(
            prepare_model_for_kbit_training(models.load(folder, kind), use_gradient_checkpointing=False), use_dora=dora
        )
        return models.distance(models.gradients(model), models.gradients(whole))

    return run


def offloaded(kind: str | None, dora: bool = False) -> Flow:
    """The gradients of the adapter on a model in CPU memory and on disk, against the whole model."""

    def run(folder: str) -> float:
        model = models.lora(models.half_offloaded(models.load(folder, kind)), use_dora=dora)
        return models.distance(
            models.gradients(model), models.gradients(models.lora(models.load(folder, kind), use_dora=dora))
        )

    return run


def offloaded_saved(kind: str | None) -> Flow:
    """An offloaded model saved and loaded again."""

    def run(folder: str) -> float:
        model = models.half_offloaded(models.load(folder, kind))
        with tempfile.TemporaryDirectory() as again:
            model.save_pretrained(again)
            return models.distance(
                [models.logits(models.load(again, None))], [models.logits(models.load(folder, kind))]
            )

    return run


def offloaded_merged(kind: str | None) -> Flow:
    """The adapter merged into an offloaded model, against the whole one."""

    def run(folder: str) -> float:
        both = models.lora(models.half_offloaded(models.load(folder, kind))), models.lora(models.load(folder, kind))
        return models.distance(*([models.logits(model.merge_and_unload())] for model in both))

    return run


def adapter_again(kind: str) -> Flow:
    """An adapter saved, and loaded on a model that is loaded anew."""

    def run(folder: str) -> float:
        from peft import PeftModel

        model = models.lora(models.load(folder, kind))
        with tempfile.TemporaryDirectory() as adapter:
            model.save_pretrained(adapter)
            return models.distance(
                [models.logits(PeftModel.from_pretrained(models.load(folder, kind), adapter))], [models.logits(model)]
            )

    return run


def trainer(kind: str) -> Flow:
    """Four steps of the Trainer, against two, and two more resumed from a checkpoint."""

    def run(folder: str) -> float:
        from transformers import Trainer, TrainingArguments

        def train(out: str, resume: bool) -> Any:
            model = models.lora(models.load(folder, kind))
            arguments = TrainingArguments(out, **STEPS)
            Trainer(model, arguments, train_dataset=_rows()).train(resume_from_checkpoint=resume or None)
            return models.trained(model)

        return _resumed(train)

    return run


def trl(kind: str, dora: bool, checkpointing: bool) -> Flow:
    """The same of the SFTTrainer, which wraps the model itself, with gradient checkpointing or without."""

    def run(folder: str) -> float:
        from datasets import Dataset
        from transformers import ByT5Tokenizer
        from trl import SFTConfig, SFTTrainer

        def train(out: str, resume: bool) -> Any:
            arguments = SFTConfig(
                out, **STEPS, max_length=None, packing=False, bf16=False, gradient_checkpointing=checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": False}, dataset_kwargs={"skip_prepare_dataset": True},
            )  # fmt: skip
            rows = Dataset.from_list(_rows())
            trainer = SFTTrainer(
                models.load(folder, kind), args=arguments, train_dataset=rows, processing_class=ByT5Tokenizer(),
                peft_config=models.config(use_dora=dora),
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume or None)
            return models.trained(trainer.model)

        return _resumed(train)

    return run


STEPS = {
    "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "seed": 3,
    "lr_scheduler_type": "constant", "learning_rate": 1e-2, "disable_tqdm": True,
}  # fmt: skip


def _rows() -> list[dict[str, list[int]]]:
    rows = [IDS[i:] + IDS[:i] for i in range(8)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _resumed(train: Callable[[str, bool], Any]) -> float:
    """How far four steps are from two, a checkpoint, and two more."""
    with tempfile.TemporaryDirectory() as out:
        whole = train(out, False)
        shutil.rmtree(Path(out) / "checkpoint-4")
        return models.distance(train(out, True), whole)


def dispatched(kind: str | None, dora: bool = False) -> Flow:
    """LoRA on a model that ``from_pretrained`` put on the CPU and the disk by a device map, against the whole one."""

    def run(folder: str) -> float:
        model = models.lora(models.dispatched(folder, kind), use_dora=dora)
        return models.distance(
            models.gradients(model), models.gradients(models.lora(models.load(folder, kind), use_dora=dora))
        )

    return run


def adapter_dispatched(kind: str | None) -> Flow:
    """A saved adapter loaded on such a model, and run in grad mode, against the whole model."""

    def run(folder: str) -> float:
        from peft import PeftModel

        model = models.lora(models.load(folder, kind))
        with tempfile.TemporaryDirectory() as adapter:
            model.save_pretrained(adapter)
            there = PeftModel.from_pretrained(models.dispatched(folder, kind), adapter).eval()
            return models.distance([there(input_ids=models.ids()).logits.detach()], [models.logits(model)])

    return run


def checkpoint_dispatched(kind: str) -> Flow:
    """A checkpoint that was saved quantized, loaded by a device map with the disk."""

    def run(folder: str) -> float:
        model = models.load(folder, kind)
        with tempfile.TemporaryDirectory() as again:
            model.save_pretrained(again)
            return models.distance([models.logits(models.dispatched(again, None))], [models.logits(model)])

    return run


def dispatched_merged(kind: str) -> Flow:
    """The adapter merged into such a model, saved and loaded again, against the whole one."""

    def run(folder: str) -> float:
        merged = [
            models.lora(model).merge_and_unload()
            for model in (models.dispatched(folder, kind), models.load(folder, kind))
        ]
        with tempfile.TemporaryDirectory() as again:
            merged[0].save_pretrained(again)
            return models.distance([models.logits(models.load(again, None))], [models.logits(merged[1])])

    return run


def dequantized(kind: str, offload: bool) -> Flow:
    """``model.dequantize()``, against the model before."""

    def run(folder: str) -> float:
        whole = models.load(folder, kind)
        model = models.load(folder, kind)
        plain = (models.half_offloaded(model) if offload else model).dequantize()
        error = models.distance([models.logits(plain)], [models.logits(whole)])
        return 0.0 if error < (1e-5 if kind == "4-bit" else 0.02) else error  # INT8 rounds activations, too

    return run


def compiled(kind: str, dora: bool, checkpointing: bool) -> Flow:
    """The gradients of a compiled train step, against those of eager."""

    def run(folder: str) -> float:
        import torch

        def step(compiled: bool) -> Any:
            model = models.lora(_prepared(folder, kind, checkpointing), use_dora=dora).train()
            if compiled:
                model.forward = torch.compile(model.forward, backend="aot_eager")
            return models.gradients(model)

        error = models.distance(step(True), step(False))
        return 0.0 if error < 1e-5 else error  # AOTAutograd may add in another order

    return run


def _prepared(folder: str, kind: str, checkpointing: bool) -> Any:
    from peft import prepare_model_for_kbit_training

    options: dict[str, Any] = {"use_gradient_checkpointing": checkpointing}
    if checkpointing:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    return prepare_model_for_kbit_training(models.load(folder, kind), **options)


def graphs(kind: str, dora: bool, checkpointing: bool) -> Callable[[str], str]:
    """Into how many graphs a train step is compiled, and if it is not one, what ``fullgraph=True`` says first."""

    def run(folder: str) -> str:
        from patches.repairs.reproducers.graphs import count_graphs, show_refused_graph

        model = models.lora(_prepared(folder, kind, checkpointing), use_dora=dora).train()
        models.gradients(model)

        def step(ids: Any) -> Any:
            return model(input_ids=ids, labels=ids).loss

        count = count_graphs(step, models.ids())
        return str(count) if count == 1 else f"{count}: {show_refused_graph(step, models.ids()).figure}"

    return run
