"""``save_pretrained`` of an offloaded image model fails, also into the folder that the model reads from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...offload import offloaded_state
from ...offload.save_over_own_files import rewrite_saving
from ..reproducers import image_models

if TYPE_CHECKING:
    from torch import Tensor


def state_dict_with_offloaded(model: Any) -> dict[str, Tensor]:
    """Return the state dict of ``model``, with the values of tensors that are on meta."""
    state: dict[str, Tensor] = model.state_dict()
    away = {name for name, tensor in state.items() if tensor.is_meta}
    if away:
        offloaded_state.fill_in(model, state, away, away)
    return state


def defect() -> Finding:
    """Save a tiny FLUX that is in CPU memory as a whole, and load it again."""
    import tempfile

    import torch
    from accelerate import cpu_offload
    from diffusers import FluxTransformer2DModel

    model = image_models.make_flux()
    expected = model.proj_out.weight.detach().clone()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except (NotImplementedError, RuntimeError) as error:
            return Finding(True, f"{type(error).__name__}: {error}")
        same = torch.equal(FluxTransformer2DModel.from_pretrained(folder).proj_out.weight, expected)
    return Finding(not same, "saved and loaded" if same else "other values were saved")


_SAVE = "diffusers.models.modeling_utils:ModelMixin.save_pretrained"

PATCH = Patch(
    id="diffusers-save-offloaded",
    summary="save_pretrained fails on image models with layers on the CPU or the disk",
    groups=("offload", "save"),
    messages=(Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),),
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/modeling_utils.py#L689",),
    why="""
        ``save_pretrained`` writes the state dict of the model. The weight of an offloaded layer is on meta there,
        because accelerate's hook brings it for a forward only: ``Cannot copy out of meta tensor; no data!``. The row
        scales of an offloaded INT8 layer that has run are in no state dict. This affects every model with a device map
        over the CPU or the disk, and ``cpu_offload`` and ``disk_offload`` of accelerate, quantized or not, on diffusers
        0.33 to 0.42.
    """,
    repair="""
        With the repair each module is brought from where it is offloaded, one at a time, and copied to CPU memory,
        which must hold the packed model. A model that reads its layers from the folder that it is saved to keeps the
        files that it reads, until all new ones are written; if that fails, the checkpoint is as it was. A model that
        has nothing on meta is saved as before.
    """,
    cost="""
        CPU memory holds a copy of the offloaded weights while they are saved.
    """,
    requires=("diffusers>=0.33", "accelerate>=0.31"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(_SAVE, "model_to_save.state_dict()", state_dict_with_offloaded, "model_to_save"),
        *rewrite_saving(_SAVE, "model_to_save.save_config(save_directory)", "safetensors.torch.save_file"),
    ),
    defect=defect,
)
