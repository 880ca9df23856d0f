"""``bnb_4bit_compute_dtype`` and ``llm_int8_threshold`` are ignored for a checkpoint that is already quantized."""

from __future__ import annotations

from typing import Any

from ...config import explicit_arguments, given_arguments
from ...engine import Finding, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized


def defect() -> Finding:
    """Save a tiny Llama in 4 bits and in INT8, and load it with another compute dtype and threshold."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    asked: tuple[tuple[dict[str, Any], str, Any], ...] = (
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, explicit_arguments.COMPUTE, torch.float16),
        ({"load_in_8bit": True}, explicit_arguments.THRESHOLD, 0.0),
    )
    said, wrong = [], False
    for how, name, value in asked:
        with tempfile.TemporaryDirectory() as packed:
            save_quantized(packed, tiny_models.make_llama(), BitsAndBytesConfig(**how), device_map="cpu")
            chosen = BitsAndBytesConfig(**how, **{name: value})
            model = AutoModelForCausalLM.from_pretrained(packed, quantization_config=chosen, device_map="cpu")
        layer = model.model.layers[0].mlp.up_proj
        got = layer.compute_dtype if name == explicit_arguments.COMPUTE else layer.state.threshold
        wrong = wrong or got != value
        said.append(f"{name} is {got}, asked for {value}")
    return Finding(wrong, "; ".join(said))


PATCH = Patch(
    id="transformers-compute-dtype-given",
    summary="bnb_4bit_compute_dtype and llm_int8_threshold are ignored for a checkpoint that is already quantized",
    groups=("from_pretrained",),
    silent=True,
    links=(
        "https://github.com/huggingface/transformers/issues/47378",
        "https://github.com/huggingface/transformers/pull/47661",
    ),
    why="""
        A T4 cannot compute in bf16, so its users load 4-bit checkpoints with
        ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)``.
        The layers still compute in the dtype of the file, because transformers takes the whole configuration of the
        checkpoint; its warning says so for each argument. A checkpoint that was saved with the default computes in
        float32, whatever the user gives. All releases (transformers #47378, #47661).
    """,
    repair="""
        Both arguments concern computing, not storage. With the repair they take effect if they were given: they go
        into the configuration of the model, and so into its layers. Otherwise the file decides. Other arguments
        (the 4-bit type, double quantization, storage) describe the saved tensors and cannot be changed. The set of
        quantized layers cannot be changed either: if ``llm_int8_skip_modules`` was given with such a checkpoint, a
        warning says that it has no effect.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite(
            "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
            find="return quantization_config",
            replace="return _patches_merge_given(quantization_config, quantization_config_from_args)",
            names={"_patches_merge_given": given_arguments.merge_given},
        ),
        explicit_arguments.RECORD_ARGUMENTS,
    ),
    defect=defect,
)
