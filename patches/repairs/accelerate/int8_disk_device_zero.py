"""``load_and_quantize_model`` needs a GPU if INT8 layers go to the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Message, Patch, Rewrite

if TYPE_CHECKING:
    import torch


def first_device() -> int | torch.device:
    """Return the first accelerator, as accelerate names it, or the CPU if there is none."""
    import torch

    return 0 if torch.accelerator.is_available() else torch.device("cpu")


def defect() -> Finding:
    """Load two layers, the second to the disk, and compare it with the original."""
    import tempfile

    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import BnbQuantizationConfig, OffloadedWeightsLoader, load_and_quantize_model
    from safetensors.torch import save_file

    if torch.accelerator.is_available():
        raise CannotShow("this machine has an accelerator, on which the layers are quantized")
    torch.manual_seed(0)
    saved: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    how = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["0"], torch_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        save_file(saved.state_dict(), f"{folder}/model.safetensors")
        try:
            load_and_quantize_model(
                model, how, f"{folder}/model.safetensors", {"0": "cpu", "1": "disk"}, offload_folder=folder
            )
        except RuntimeError as error:
            return Finding(True, f"while loading: {error}")
        packed, scales = (OffloadedWeightsLoader(save_folder=folder)[f"1.{name}"] for name in ("weight", "SCB"))
    off = (packed * scales[:, None] / 127 - saved[1].weight.detach()).abs().max() / scales.max()
    return Finding(
        not off < 0.01, f"the weight on the disk differs from the original by {float(off):.1e} of its largest value"
    )


_TARGET = "accelerate.utils.bnb:quantize_and_offload_8bit"

PATCH = Patch(
    id="accelerate-int8-disk-device-zero",
    summary="load_and_quantize_model with INT8 layers on disk needs a GPU to quantize them",
    groups=("offload", "cpu"),
    messages=(
        Message(
            "Cannot access accelerator device when none is available.",
            "torch/lib/libtorch_cpu.so",
            parts=("Cannot access accelerator device when none is available",),
        ),
    ),
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/bnb.py#L445",),
    why="""
        accelerate quantizes these layers on device 0 before it writes them. Without an accelerator this raises
        ``Cannot access accelerator device when none is available``. Layers that are not offloaded are quantized
        where they are, also on a CPU. accelerate up to 1.15, with every bitsandbytes that quantizes on a CPU.
    """,
    repair="""
        The repair quantizes on the CPU if there is no accelerator; with one, nothing changes. It writes the packed
        weights as a plain tensor, because in bitsandbytes 0.46 the writer's call of ``weight.cpu()`` quantizes
        packed weights a second time, and the scales are written after that.
    """,
    requires=("accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
    tested_up_to="1.15.0",
    edits=(
        Rewrite(
            _TARGET,
            find="set_module_tensor_to_device(model, param_name, 0, dtype=new_dtype, value=param)",
            replace="set_module_tensor_to_device(model, param_name, _patches_first_device(), dtype=new_dtype, value=param)",
            names={"_patches_first_device": first_device},
        ),
        Rewrite(
            _TARGET,
            find="offload_weight(module._parameters[tensor_name], param_name, offload_folder, index=offload_index)",
            replace="""
                offload_weight(
                    module._parameters[tensor_name].data, param_name, offload_folder, index=offload_index
                )
            """,
        ),
    ),
    defect=defect,
)
