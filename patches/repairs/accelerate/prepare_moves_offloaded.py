"""``accelerator.prepare`` and the Trainer raise an error for a model that was offloaded without a device map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Part, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.nn import Module


def stays(accelerator: Accelerator, model: Module) -> bool:
    """Tell whether the hooks of ``model`` bring the weights that are not on its device."""
    return accelerator.distributed_type.value == "NO" and offloaded_modules.is_trainable_offloaded(model)


def move_unless_offloaded(model: Module, device: torch.device) -> Module:
    """Move ``model`` to ``device``, unless hooks bring the weights that are not there."""
    return model if offloaded_modules.is_trainable_offloaded(model) else model.to(device)


def _make_offloaded() -> Any:
    """Make two linear layers, of which one is in CPU memory and not trained."""
    import torch
    from accelerate import cpu_offload

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    cpu_offload(model[1].requires_grad_(False), execution_device=torch.device("cpu"))
    return model


def defect_prepare() -> Finding:
    """Train one of two linear layers; the other is in CPU memory."""
    import torch
    from accelerate import Accelerator

    try:
        model = Accelerator(cpu=True).prepare_model(_make_offloaded())
    except NotImplementedError as error:
        return Finding(True, f"NotImplementedError: {error}")
    return Finding(bool(model(torch.ones(1, 4)).isnan().any()), "prepared")


def defect_trainer() -> Finding:
    """Make a Trainer for two linear layers; one of them is in CPU memory."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        try:
            Trainer(_make_offloaded(), TrainingArguments(folder, use_cpu=True, report_to=[]), train_dataset=[])
        except NotImplementedError as error:
            return Finding(True, f"NotImplementedError: {error}")
    return Finding(False, "the Trainer is made")


PATCH = Patch(
    id="accelerate-prepare-moves-offloaded",
    summary="accelerator.prepare and the Trainer raise an error for a model that was offloaded without a device map",
    groups=("offload", "train"),
    messages=(Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),),
    links=(
        "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py#L1880",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/trainer.py#L4750",
    ),
    why="""
        ``accelerator.prepare`` raises an error for a model that was offloaded without a device map.
        ``prepare_model`` leaves a model where it is if it has a device map. ``cpu_offload``, ``disk_offload`` and
        offloading a single module set none. The model is then moved to the device of the process, which raises
        ``Cannot copy out of meta tensor; no data!`` at the first offloaded parameter. All releases of accelerate.

        The Trainer raises an error for a model that was offloaded without a device map. ``Trainer`` leaves a plain
        model where it is if it has a device map. ``cpu_offload``, ``disk_offload`` and offloading a single module
        set none, so creating the Trainer raises ``Cannot copy out of meta tensor; no data!``. transformers 4.53
        also moves models with a device map. The Accelerator, which the Trainer calls next, has the same defect.
    """,
    repair="""
        With the repair, ``accelerator.prepare`` leaves an offloaded model where its hooks have it if no offloaded
        parameter is trained and there is one process. In a distributed run the error stays. It also stays if offloaded
        parameters are trained, because accelerate would drop their gradients.

        With the repair, the Trainer leaves an offloaded model where its hooks have it if no offloaded parameter is
        trained.
    """,
    former_ids=("transformers-trainer-moves-offloaded",),
    parts=(
        Part(
            "prepare",
            ("accelerate>=0.26.1",),
            "1.15.0",
            (
                Rewrite(
                    "accelerate.accelerator:Accelerator.prepare_model",
                    find="device_placement and not self.verify_device_map(model)",
                    replace="device_placement and not self.verify_device_map(model) and not _patches_stays(self, model)",
                    names={"_patches_stays": stays},
                ),
            ),
            defect_prepare,
        ),
        Part(
            "Trainer",
            ("transformers>=4.53", "accelerate>=1.1"),
            "5.24.0",
            (
                Rewrite.to_call(
                    "transformers.trainer:Trainer._move_model_to_device",
                    find="model.to(device)",
                    function=move_unless_offloaded,
                    arguments="model, device",
                ),
            ),
            defect_trainer,
        ),
    ),
)
