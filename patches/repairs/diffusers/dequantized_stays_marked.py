"""A model that was dequantized is still marked as quantized: what it is saved as cannot be loaded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ...config import quantizers
from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...engine.gate import satisfied
from ..reproducers import image_models

_CONFIG = "quantization_config"
_MARKS = (
    "is_loaded_in_4bit",
    "is_loaded_in_8bit",
    "is_4bit_serializable",
    "is_8bit_serializable",
    "quantization_method",
)


def forget_quantization(model: Any) -> None:
    """Take from ``model``, which was dequantized, its quantizer, its quantization configuration and the marks of both."""
    if quantizers.is_bitsandbytes(model.hf_quantizer):
        config = model._internal_dict
        if _CONFIG in config:
            OrderedDict.__delitem__(config, _CONFIG)  # its own method refuses
        vars(config).pop(_CONFIG, None)
        for name in _MARKS:
            vars(model).pop(name, None)
        model.is_quantized = False
    del model.hf_quantizer


def defect() -> Finding:
    """Dequantize a tiny INT8 FLUX, save it, and load it as the plain model that it is."""
    import tempfile

    import torch
    from diffusers import FluxTransformer2DModel

    if satisfied("diffusers<0.37"):
        raise CannotShow("before diffusers 0.37 INT8 models cannot be loaded with each accelerate")
    if satisfied("bitsandbytes<0.48"):
        raise CannotShow("before bitsandbytes 0.48 another defect comes first: INT8 weights are quantized again")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
        image_models.save_flux(folder)
        plain = image_models.load_flux(folder, load_in_8bit=True).dequantize()
        plain.save_pretrained(saved)
        try:
            with image_models.as_with_gpu():
                again = FluxTransformer2DModel.from_pretrained(saved, device_map="cpu")
        except ValueError as error:
            return Finding(True, f"ValueError: {error}")
    inputs = image_models.flux_inputs(torch.float32)
    same = torch.equal(again(**inputs)[0], plain(**inputs)[0])
    return Finding(not same, "saved and loaded" if same else "another model was loaded")


PATCH = Patch(
    id="diffusers-dequantized-stays-marked",
    summary="an image model that was dequantized is saved as a quantized one, which cannot be loaded",
    groups=("save", "merge", "move"),
    silent=True,
    messages=(
        Message("Missing quantization component `SCB`", "diffusers/quantizers/bitsandbytes/bnb_quantizer.py"),
        Message(
            "Supplied state dict for context_embedder.weight does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",
            "diffusers/quantizers/bitsandbytes/bnb_quantizer.py",
            parts=("does not contain `bitsandbytes__*` and possibly other `quantized_stats` components.",),
        ),
    ),
    links=("https://github.com/huggingface/transformers/issues/34847",),
    why="""
        ``dequantize()`` replaces the layers and leaves the marks of a quantized model: ``quantization_config`` in its
        configuration, ``quantization_method``, ``is_loaded_in_4bit``. If a program then saves the model, the
        ``config.json`` in the folder says that the weights are packed. ``from_pretrained`` raises ``Missing
        quantization component `SCB``` (INT8) or ``Supplied state dict … does not contain `bitsandbytes__*``` (4-bit).
        ``pipe.to(torch.float16)`` silently leaves such a model in its dtype, with a log message about 4 bits. Up to
        diffusers 0.38 ``model.to(dtype)``, ``half()`` and ``float()`` raise an error, and with bitsandbytes before 0.48
        an INT8 model that was dequantized cannot be moved to another device. transformers had the same defect (#34847).
        All releases.
    """,
    repair="""
        The repair removes these marks when the model is dequantized, and nothing else. A model that was saved
        without the patch loads after ``quantization_config`` is removed from its ``config.json``.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            "diffusers.quantizers.base:DiffusersQuantizer.dequantize",
            find="del model.hf_quantizer",
            replace="_patches_forget_quantization(model)",
            names={"_patches_forget_quantization": forget_quantization},
        ),
    ),
    defect=defect,
)
