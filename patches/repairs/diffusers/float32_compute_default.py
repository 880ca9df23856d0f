"""A bf16 image model in 4 bits silently computes in float32, the default of ``bnb_4bit_compute_dtype``."""

from __future__ import annotations

from ...config import explicit_arguments, float32_compute
from ...config.quantizers import BEFORE_LOADING, QUANTIZERS_OF_DIFFUSERS
from ...engine import Finding, Patch, Rewrite
from ..reproducers import image_models
from ..reproducers.log_records import record_logs


def defect() -> Finding:
    """Load a tiny FLUX of bf16 in 4 bits without a compute dtype, and look for a warning."""
    import tempfile

    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with tempfile.TemporaryDirectory() as folder, image_models.as_with_gpu():
        image_models.save_flux(folder)
        with record_logs() as said:
            model = FluxTransformer2DModel.from_pretrained(
                folder, quantization_config=how, torch_dtype=torch.bfloat16, device_map="cpu"
            )
    computes = model.x_embedder.compute_dtype
    silent = not any("compute in float32" in record.getMessage() for record in said)
    return Finding(silent and computes is torch.float32, f"computes in {computes}, {len(said)} warnings")


PATCH = Patch(
    id="diffusers-float32-compute-default",
    effect="warns",
    summary="a bf16 image model in 4 bits silently computes in float32, the default of bnb_4bit_compute_dtype",
    groups=("from_pretrained", "train"),
    silent=True,
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/quantization_config.py",),
    why="""
        The default of ``BitsAndBytesConfig(load_in_4bit=True)`` in diffusers is float32, as in transformers. Each
        product of a 4-bit layer casts its input to float32, dequantizes the weight to twice the memory of 16 bits,
        multiplies without the 16-bit units of the GPU, and casts the result back, at every denoising step. This
        affects a bf16 model that is loaded without ``bnb_4bit_compute_dtype``, and checkpoints that were saved from
        it. Outputs are right, but slow. The warning of bitsandbytes for this case is never shown, because diffusers
        passes the default as if the user had chosen it. All releases.
    """,
    repair="""
        The patch changes no number. Once a process, a warning names the dtype that the model computes in, says why
        that is slow, and what to write. It does not warn if a compute dtype was given, also float32.
    """,
    cost="""
        A comparison while loading.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(
            f"{QUANTIZERS_OF_DIFFUSERS[0]}.{BEFORE_LOADING}",
            find="replace_with_bnb_linear",
            function=float32_compute.warn_of_float32,
            arguments="self, model, replace_with_bnb_linear",
        ),
        explicit_arguments.RECORD_ARGUMENTS_OF_DIFFUSERS,
    ),
    defect=defect,
)
