"""The Trainer raises an error for a model that was offloaded without a device map.

``Trainer`` leaves a plain model where it is if it has a device map. ``cpu_offload``, ``disk_offload`` and offloading a
single module set none, so creating the Trainer raises ``Cannot copy out of meta tensor; no data!``. transformers 4.53
also moves models with a device map. The Accelerator, which the Trainer calls next, has the same defect:
``accelerate-prepare-moves-offloaded``.

With the repair an offloaded model stays where its hooks have it, if no offloaded parameter is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def moved(model: Module, device: torch.device) -> Module:
    """``model`` on ``device``, or as it is if hooks bring what is not there."""
    return model if offloaded_modules.is_trainable_offloaded(model) else model.to(device)


def defect() -> Finding:
    """Make a Trainer for two linear layers; one of them is in CPU memory."""
    import tempfile

    import torch
    from accelerate import cpu_offload
    from transformers import Trainer, TrainingArguments

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    cpu_offload(model[1].requires_grad_(False), execution_device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            Trainer(model, TrainingArguments(folder, use_cpu=True, report_to=[]), train_dataset=[])
        except NotImplementedError as error:
            return Finding(True, f"NotImplementedError: {error}")
    return Finding(False, "the Trainer is made")


PATCH = Patch(
    id="transformers-trainer-moves-offloaded",
    summary="the Trainer raises an error for a model that was offloaded without a device map",
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py#L4750",),
    requires=("transformers>=4.53", "accelerate>=1.1"),
    tested_up_to="5.24.0",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            "transformers.trainer:Trainer._move_model_to_device",
            find="model.to(device)",
            replace="_patches_moved(model, device)",
            names={"_patches_moved": moved},
        ),
    ),
    defect=defect,
)
