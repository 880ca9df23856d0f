"""``accelerator.prepare`` raises an error for a model that was offloaded without a device map.

``prepare_model`` leaves a model where it is if it has a device map. ``cpu_offload``, ``disk_offload`` and offloading a
single module set none. The model is then moved to the device of the process, which raises ``Cannot copy out of meta
tensor; no data!`` at the first offloaded parameter. All releases of accelerate.

With the repair, an offloaded model stays where its hooks have it if no offloaded parameter is trained and there is one
process. In a distributed run the error stays. It also stays if offloaded parameters are trained, because accelerate
would drop their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine import Finding, Patch, Rewrite
from ...offload import offloaded_modules

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.nn import Module


def stays(accelerator: Accelerator, model: Module) -> bool:
    """Whether the hooks of ``model`` bring what is not on its device."""
    return accelerator.distributed_type.value == "NO" and offloaded_modules.is_trainable_offloaded(model)


def defect() -> Finding:
    """Train one of two linear layers; the other is in CPU memory."""
    import torch
    from accelerate import Accelerator, cpu_offload

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    cpu_offload(model[1].requires_grad_(False), execution_device=torch.device("cpu"))
    try:
        model = Accelerator(cpu=True).prepare_model(model)
    except NotImplementedError as error:
        return Finding(True, f"NotImplementedError: {error}")
    return Finding(bool(model(torch.ones(1, 4)).isnan().any()), "prepared")


PATCH = Patch(
    id="accelerate-prepare-moves-offloaded",
    summary="accelerator.prepare raises an error for a model that was offloaded without a device map",
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py#L1880",),
    requires=("accelerate>=0.26.1",),
    tested_up_to="1.15.0",
    seen_on=("2.13", "2.15"),
    edits=(
        Rewrite(
            "accelerate.accelerator:Accelerator.prepare_model",
            find="device_placement and not self.verify_device_map(model)",
            replace="device_placement and not self.verify_device_map(model) and not _patches_stays(self, model)",
            names={"_patches_stays": stays},
        ),
    ),
    defect=defect,
)
