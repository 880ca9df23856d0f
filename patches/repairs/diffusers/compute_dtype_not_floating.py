"""``bnb_4bit_compute_dtype=torch.int8`` is accepted for image models, and 4-bit layers silently return wrong numbers."""

from __future__ import annotations

from ...config import compute_dtypes
from ...engine import CannotShow, Finding, Patch
from ...engine.gate import satisfied
from ..reproducers import image_models


def defect() -> Finding:
    """Load a tiny FLUX in 4 bits with whole numbers as its compute dtype, and run it."""
    import tempfile

    import torch

    if satisfied("bitsandbytes<0.47"):
        raise CannotShow("before bitsandbytes 0.47 an input in float32 decides in which dtype a 4-bit layer computes")
    outputs, inputs = [], image_models.flux_inputs(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        image_models.save_flux(folder)
        for compute in (torch.float32, torch.int8):
            how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
            try:
                model = image_models.load_flux(folder, **how)
            except ValueError as error:
                return Finding(False, f"ValueError: {error}".partition(". It")[0])
            try:
                with torch.no_grad():
                    outputs.append(model(**inputs)[0])
            except RuntimeError as error:  # some kernels refuse it, in their own words
                return Finding(True, f"RuntimeError: {str(error)[:70]}")
    off = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
    return Finding(not off < 0.1, f"computes in torch.int8, output off by {off:.1e} of its norm")


PATCH = Patch(
    id="diffusers-compute-dtype-not-floating",
    effect="warns",
    summary="bnb_4bit_compute_dtype=torch.int8 is accepted for image models: their outputs are silently wrong",
    groups=("from_pretrained",),
    silent=True,
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/quantizers/quantization_config.py",),
    why="""
        The ``BitsAndBytesConfig`` of diffusers accepts any dtype as the compute dtype of 4-bit layers. With
        ``torch.int8`` or ``torch.uint8``, which users confuse with the storage dtype, activations and weights are
        truncated to integers: the forward runs, and its outputs are silently wrong. A name that torch does not have
        (``"fp16"``) raises ``module 'torch' has no attribute 'fp16'``. All releases.
    """,
    repair="""
        With the repair each of these raises a ``ValueError`` before anything is loaded, as with transformers
        (``transformers-compute-dtype-not-floating``). float16, bfloat16, float32 and float64 are accepted as before.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=compute_dtypes.rewrite_config("diffusers.quantizers.quantization_config:BitsAndBytesConfig"),
    defect=defect,
)
