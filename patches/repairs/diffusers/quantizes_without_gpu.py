"""diffusers refuses to quantize on a machine without a GPU, although bitsandbytes computes on the CPU."""

from __future__ import annotations

import functools
from typing import Any

from ...config.quantizers import QUANTIZERS_OF_DIFFUSERS
from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ...process.messages import LOGGER
from ..reproducers import image_models


def finds_device(found: bool, options: dict[str, Any]) -> bool:
    """Tell whether there is a device to quantize on; ``found`` is upstream's answer, ``options`` hold the ``device_map``."""
    import torch

    return found or not torch.accelerator.is_available() and _is_for_cpu(options.get("device_map"))


def map_or_cpu(device_map: Any) -> Any:
    """Return ``device_map``; on a machine that has only a CPU, return the map of ``device_map="cpu"`` in the place of None."""
    import torch

    if device_map is None and not torch.accelerator.is_available():
        _tell()
        return {"": torch.device("cpu")}
    return device_map


@functools.cache
def _tell() -> None:
    """Warn, once a process: a driver may be missing, and then a program that was refused before is slow."""
    LOGGER.warning(
        "torch finds no accelerator, so this image model is quantized and computes on the CPU. If the machine has a GPU, "
        "check its driver and the build of torch; device_map='cpu' loads to the CPU without this warning."
    )


def _is_for_cpu(device_map: Any) -> bool:
    """Tell whether ``device_map`` asks for no device but the CPU; diffusers has made a dictionary of a device."""
    import torch

    if not isinstance(device_map, dict):
        return True
    return all(
        place == "disk" or isinstance(place, (str, torch.device)) and torch.device(place).type == "cpu"
        for place in device_map.values()
    )


def defect() -> Finding:
    """Quantize a tiny FLUX on a machine without a GPU, and compute with it."""
    import tempfile

    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    if torch.accelerator.is_available():
        raise CannotShow("this machine has an accelerator, on which diffusers quantizes")
    inputs, said, refused = image_models.flux_inputs(torch.float32), [], False
    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder)
        plain = FluxTransformer2DModel.from_pretrained(folder)(**inputs)[0]
        bits = [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}]
        # Older releases of diffusers cannot load INT8 models with each accelerate, even with a GPU.
        if satisfied("diffusers>=0.37") and satisfied("bitsandbytes>=0.48"):
            bits.append({"load_in_8bit": True})
        for how in bits:
            options = {"quantization_config": BitsAndBytesConfig(**how), "torch_dtype": torch.float32}
            try:
                model = FluxTransformer2DModel.from_pretrained(folder, **options)
            except RuntimeError as error:
                refused = True
                said.append(f"RuntimeError: {error}")
                continue
            off = ((model(**inputs)[0] - plain).norm() / plain.norm()).item()
            refused = refused or not off < 0.3
            said.append(f"{next(iter(how))}: computes on {model.device.type}, output {off:.0%} from the plain model's")
    return Finding(refused, "; ".join(dict.fromkeys(said)))


_4_BIT, _8_BIT = QUANTIZERS_OF_DIFFUSERS
_CUDA_OR_XPU = "torch.cuda.is_available() or torch.xpu.is_available()"
_OR_MPS = f"{_CUDA_OR_XPU} or torch.mps.is_available()"
_INT8 = "bitsandbytes>=0.48"  # older ones quantize packed INT8 weights again when they are moved

PATCH = Patch(
    id="diffusers-quantizes-without-gpu",
    summary="image models cannot be quantized on a machine without a GPU",
    groups=("cpu", "from_pretrained"),
    messages=(
        Message(
            "No GPU found. A GPU is needed for quantization.", "diffusers/quantizers/bitsandbytes/bnb_quantizer.py"
        ),
    ),
    links=(
        "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
    ),
    why="""
        bitsandbytes 0.46 and later quantize and compute on the CPU, and transformers does so with them. The same
        program with a model of diffusers raises ``No GPU found. A GPU is needed for quantization.``, in 4 bits and
        in INT8, while it quantizes and when it loads a checkpoint that is quantized already. So an adapter cannot
        be merged, a checkpoint cannot be converted, and a training script cannot be tested on a machine without a
        GPU. All releases.
    """,
    repair="""
        On a machine without any accelerator, a model is quantized on the CPU: without ``device_map`` it is loaded as
        with ``device_map="cpu"``, with one warning in each process. A map that asks for another device gives the same
        error as before. On a machine with an accelerator nothing changes. INT8 stays refused with bitsandbytes before
        0.48, which quantizes packed weights again when they are moved: the outputs would be wrong.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        *(
            Rewrite(
                f"{quantizer}.validate_environment",
                find=find,
                replace=f"_patches_finds_device({find}, kwargs)",
                names={"_patches_finds_device": finds_device},
                when=when,
            )
            for quantizer, find, when in (
                (_4_BIT, _OR_MPS, "diffusers>=0.39"),
                (_4_BIT, _CUDA_OR_XPU, "diffusers<0.39"),
                (_8_BIT, _CUDA_OR_XPU, _INT8),
            )
        ),
        *(
            Rewrite(
                f"{quantizer}.update_device_map",
                find="device_map is None",
                replace="(device_map := _patches_map_or_cpu(device_map)) is None",
                names={"_patches_map_or_cpu": map_or_cpu},
                when=when,
            )
            for quantizer, when in ((_4_BIT, ""), (_8_BIT, _INT8))
        ),
    ),
    defect=defect,
)
