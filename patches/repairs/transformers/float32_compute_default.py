"""A bf16 model in 4 bits silently computes in float32, the default of ``bnb_4bit_compute_dtype``."""

from __future__ import annotations

from ...config import explicit_arguments, float32_compute
from ...engine import Finding, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.log_records import record_logs
from ..reproducers.quantized_models import load_quantized


def defect() -> Finding:
    """Load a tiny Llama of bf16 in 4 bits as tutorials do, and look for a warning."""
    import torch
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with record_logs() as said:
        model = load_quantized(tiny_models.make_llama(), how, torch_dtype=torch.bfloat16, device_map="cpu")
    computes = model.model.layers[0].mlp.up_proj.compute_dtype
    silent = not any("compute in float32" in record.getMessage() for record in said)
    return Finding(silent and computes is torch.float32, f"computes in {computes}, {len(said)} warnings")


PATCH = Patch(
    id="transformers-float32-compute-default",
    former_ids=("transformers-computes-in-float32",),
    effect="warns",
    summary="a bf16 model in 4 bits silently computes in float32, the default of bnb_4bit_compute_dtype",
    groups=("from_pretrained", "train"),
    silent=True,
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/utils/quantization_config.py",),
    why="""
        The default of ``BitsAndBytesConfig(load_in_4bit=True)`` is older than bf16 models. Each product of a 4-bit
        layer casts its input to float32, dequantizes the weight to twice the memory of 16 bits, multiplies without
        the 16-bit units of the GPU, and casts the result back. This affects ``load_in_4bit=True`` alone, as in
        tutorials, and checkpoints that were saved from such a model. Outputs are right, but slow. bitsandbytes has
        a warning for this case, but it is never shown through transformers, which passes the default as if the user
        had chosen it. All releases.
    """,
    repair="""
        The patch changes no number. Once a process, a warning names the dtype that the model computes in, says why
        that is slow, and what to write. It does not warn if a compute dtype was given, also float32.
    """,
    cost="""
        A comparison while loading.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer._process_model_before_weight_loading",
            find="replace_with_bnb_linear",
            function=float32_compute.warn_of_float32,
            arguments="self, model, replace_with_bnb_linear",
        ),
        explicit_arguments.RECORD_ARGUMENTS,
    ),
    defect=defect,
)
