"""The Trainer on adapters of an offloaded model, and what it still refuses.

Also of ``accelerate-prepare-moves-offloaded``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import patches
from patches.engine.gate import satisfied
from tests.repairs.peft.offloading import CHECKPOINTING, assert_same, lora, offloaded, whole

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.one_in(2)

FLOWS = [
    ("plain", "from_pretrained", "none"), ("plain", "disk_offload", "non-reentrant"), ("int8", "dispatch_model", "none"),
    ("int8", "dispatch_model", "reentrant"), ("int8", "layer by layer", "non-reentrant"),
    ("nf4", "dispatch_model", "non-reentrant"), ("nf4", "cpu_offload", "none"), ("nf4", "disk_offload", "reentrant"),
]  # fmt: skip


def trained(model: Any, folder: Path, checkpointing: str = "none", resume: bool = False) -> dict[str, torch.Tensor]:
    """Four steps with accumulation, evaluation and checkpoints; the last two once more from the checkpoint of two."""
    from transformers import Trainer, TrainingArguments

    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": CHECKPOINTING[checkpointing]},
    }
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=2, save_steps=2, load_best_model_at_end=True, logging_steps=1, report_to=[], disable_tqdm=True, seed=1,
        use_cpu=next(p for p in model.parameters() if p.requires_grad).device.type == "cpu",
        **(options if checkpointing != "none" else {}),
    )  # fmt: skip
    if checkpointing == "reentrant" and satisfied("transformers<5"):
        model.enable_input_require_grads()  # the Trainer of transformers 5 does so; without it a whole model has no gradient either
    arguments._n_gpu = min(arguments.n_gpu, 1)  # a whole model would go to both devices by DataParallel
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    losses = [entry.get("loss", entry.get("eval_loss", 0.0)) for entry in trainer.state.log_history]
    state = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {"losses": torch.tensor(losses), **state}


@pytest.mark.parametrize("kind, way, checkpointing", FLOWS)
def test_the_trainer(kind, way, checkpointing, base, tmp_path, device):
    with patches.applied():
        got = trained(lora(offloaded(base, kind, way, device)), tmp_path / "off", checkpointing)
        assert_same(got, trained(lora(whole(base, kind, device)), tmp_path / "whole", checkpointing))


def test_resumed(base, tmp_path, device):
    """From a checkpoint, in another process as it were, and to the same end as without a stop."""
    with patches.applied():
        expected = trained(lora(whole(base, "nf4", device)), tmp_path)
        got = trained(lora(offloaded(base, "nf4", "dispatch_model", device)), tmp_path, resume=True)
        assert_same(got, expected)


def test_trainable_parameters_that_are_offloaded_are_refused(base, device):
    """Such as the norms of a model that nobody froze: their gradients would go with their weights."""
    with patches.applied():
        model = offloaded(base, "nf4", "dispatch_model", device)
        assert any(p.requires_grad and p.is_meta for p in model.parameters())
        with pytest.raises(ValueError, match="with CPU or disk offload"):
            accelerate.Accelerator(cpu=device == "cpu").prepare_model(model)
        model = offloaded(base, "plain", "disk_offload", device)
        with pytest.raises(NotImplementedError, match="meta"):
            accelerate.Accelerator(cpu=device == "cpu").prepare_model(model)


def test_a_model_that_is_not_offloaded_is_moved_as_before(tmp_path, device):
    from transformers import Trainer, TrainingArguments

    model = torch.nn.Linear(4, 4)
    with patches.applied("accelerate-prepare-moves-offloaded"):
        arguments = TrainingArguments(str(tmp_path), use_cpu=device == "cpu", report_to=[])
        Trainer(model, arguments, train_dataset=[])._move_model_to_device(model, torch.device("meta"))
    assert model.weight.is_meta


def test_a_map_without_hooks_is_refused(base, device):
    with patches.applied():
        model = lora(whole(base, "nf4", device))
        model.base_model.model.hf_device_map = {"model": device, "lm_head": "disk"}
        with pytest.raises(ValueError, match="with CPU or disk offload"):
            accelerate.Accelerator(cpu=device == "cpu").prepare_model(model)
