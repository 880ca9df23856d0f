"""``bnb_4bit_compute_dtype`` and ``llm_int8_threshold`` are ignored for an image model that is already quantized."""

from __future__ import annotations

from typing import Any

from ...config import explicit_arguments, given_arguments
from ...engine import Finding, Patch, Rewrite
from ...engine.gate import satisfied
from ..reproducers import image_models


def defect() -> Finding:
    """Save a tiny FLUX in 4 bits and in INT8, and load it with another compute dtype and threshold."""
    import tempfile

    import torch

    asked: tuple[tuple[dict[str, Any], str, Any], ...] = (
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, explicit_arguments.COMPUTE, torch.float16),
        ({"load_in_8bit": True}, explicit_arguments.THRESHOLD, 0.0),
    )
    if satisfied("diffusers<0.37"):  # which cannot load INT8 models with each accelerate, even with a GPU
        asked = asked[:1]
    said, wrong = [], False
    for how, name, value in asked:
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as packed:
            image_models.save_flux(plain)
            image_models.load_flux(plain, **how).save_pretrained(packed)
            layer = image_models.load_flux(packed, **how, **{name: value}).x_embedder
        got = layer.compute_dtype if name == explicit_arguments.COMPUTE else layer.state.threshold
        wrong = wrong or got != value
        said.append(f"{name} is {got}, asked for {value}")
    return Finding(wrong, "; ".join(said))


PATCH = Patch(
    id="diffusers-compute-dtype-given",
    summary="bnb_4bit_compute_dtype and llm_int8_threshold are ignored for an image model that is already quantized",
    groups=("from_pretrained",),
    silent=True,
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/auto.py",),
    why="""
        A T4 cannot compute in bf16, so its users load 4-bit FLUX checkpoints with
        ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)``. The layers still compute in
        the dtype of the file, because diffusers takes the whole configuration of the checkpoint, with a general
        warning. A checkpoint that was saved with the default computes in float32, whatever the user gives. All
        releases.
    """,
    repair="""
        Both arguments concern computing, not storage. With the repair they take effect if they were given, as with
        transformers (``transformers-compute-dtype-given``); otherwise the file decides. Arguments that describe the
        saved tensors cannot be changed. If ``llm_int8_skip_modules`` was given with such a checkpoint, a warning
        says that it has no effect.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite(
            "diffusers.quantizers.auto:DiffusersAutoQuantizer.merge_quantization_configs",
            find="return quantization_config",
            replace="return _patches_merge_given(quantization_config, quantization_config_from_args)",
            names={"_patches_merge_given": given_arguments.merge_given},
        ),
        explicit_arguments.RECORD_ARGUMENTS_OF_DIFFUSERS,
    ),
    defect=defect,
)
