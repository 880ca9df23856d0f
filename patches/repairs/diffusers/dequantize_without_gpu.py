"""``dequantize()`` of a 4-bit model that is on the CPU needs a GPU."""

from __future__ import annotations

from typing import Any

from ...config.quantizers import QUANTIZERS_OF_DIFFUSERS
from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...quantized.four_bit import quant_states
from ..reproducers import image_models


def moves_to_gpu(on_cpu: bool, model: Any) -> bool:
    """Tell whether to move ``model``, whose first tensor is ``on_cpu``, to a GPU and back; raise if the CPU cannot read a weight."""
    import torch

    if not on_cpu or torch.cuda.is_available() or torch.xpu.is_available():
        return on_cpu
    for name, weight in model.named_parameters():
        if quant_states.is_for_cpu_kernel(quant_states.get_quant_state(weight)):
            raise ValueError(
                f"{name!r} cannot be dequantized: a forward has changed the layout of its bytes for this processor, and rounded its "
                "scales. Apply the patch bitsandbytes-cpu-repack with patches.apply(), and load the model again."
            )
    return False


def defect() -> Finding:
    """Dequantize a tiny 4-bit FLUX on a machine without a GPU."""
    import tempfile

    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        raise CannotShow("this machine has a GPU, to which the model is moved")
    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder)
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        model, same = image_models.load_flux(folder, **how), image_models.load_flux(folder, **how)
    inputs = image_models.flux_inputs(torch.float32)
    quantized = same(**inputs)[0]
    try:
        plain = model.dequantize()
    except (AssertionError, RuntimeError) as error:
        return Finding(True, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    off = ((plain(**inputs)[0] - quantized).norm() / quantized.norm()).item()
    return Finding(not off < 0.02, f"dequantized on the CPU, output {off:.0e} from the quantized model's")


PATCH = Patch(
    id="diffusers-dequantize-without-gpu",
    summary="dequantize() of a 4-bit image model on the CPU fails on a machine without a CUDA device",
    groups=("cpu", "merge"),
    messages=(Message("Torch not compiled with CUDA enabled", "torch/cuda/__init__.py"),),
    links=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
    ),
    why="""
        If a 4-bit model is on the CPU, ``dequantize()`` moves the whole model to ``torch.cuda.current_device()``,
        and back at the end. Without CUDA this raises ``Torch not compiled with CUDA enabled`` or ``Found no NVIDIA
        driver on your system``: on a machine without a GPU, and on a Mac, where diffusers quantizes on ``mps``.
        bitsandbytes dequantizes on the CPU too, and INT8 models are dequantized where they are. All releases.
    """,
    repair="""
        Without CUDA and XPU the model stays on the CPU and is dequantized there. With one of them it is moved as
        before. If the bytes of a weight have the layout of a kernel of the processor, which nothing else can read,
        an error names the layer (``bitsandbytes-cpu-repack`` prevents that layout).
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(
            f"{QUANTIZERS_OF_DIFFUSERS[0]}._dequantize",
            find="model.device.type == 'cpu'",
            function=moves_to_gpu,
            arguments="model.device.type == 'cpu', model",
        ),
    ),
    defect=defect,
)
