"""``bnb_4bit_compute_dtype=torch.int8`` is accepted, and 4-bit layers silently return wrong numbers."""

from __future__ import annotations

from ...config import compute_dtypes
from ...engine import CannotShow, Finding, Patch
from ...engine.gate import satisfied
from ..reproducers import tiny_models
from ..reproducers.quantized_models import load_quantized


def defect() -> Finding:
    """Load a tiny Llama in 4 bits with whole numbers as its compute dtype, and run it."""
    import torch
    from transformers import BitsAndBytesConfig

    if satisfied("bitsandbytes<0.47"):
        raise CannotShow("before bitsandbytes 0.47 an input in float32 decides in which dtype a 4-bit layer computes")
    outputs = []
    for compute in (torch.float32, torch.int8):
        try:
            how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
        except ValueError as error:
            return Finding(False, f"ValueError: {error}".partition(". It")[0])
        model = load_quantized(tiny_models.make_llama(), how, torch_dtype=torch.float32)
        try:
            with torch.no_grad():
                outputs.append(model(torch.arange(8)[None]).logits)
        except RuntimeError as error:  # some kernels refuse it, in their own words
            return Finding(True, f"RuntimeError: {str(error)[:70]}")
    off = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
    return Finding(not off < 0.1, f"computes in torch.int8, logits off by {off:.1e} of their norm")


PATCH = Patch(
    id="transformers-compute-dtype-not-floating",
    effect="warns",
    summary="bnb_4bit_compute_dtype=torch.int8 is accepted, and 4-bit layers silently return wrong numbers",
    groups=("from_pretrained",),
    silent=True,
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/utils/quantization_config.py",),
    why="""
        ``BitsAndBytesConfig`` accepts any dtype as the compute dtype of 4-bit layers. With ``torch.int8`` or
        ``torch.uint8``, which users confuse with the storage dtype, activations and weights are truncated to
        integers: the forward runs, and its outputs are silently wrong. A float8 gives NaN, a complex dtype zeros. A
        name that torch does not have (``"fp16"``) raises ``module 'torch' has no attribute 'fp16'``. All releases.
    """,
    repair="""
        With the repair each of these raises a ``ValueError`` before anything is loaded. It names the value and the
        accepted ones. float16, bfloat16, float32 and float64 are accepted as before.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=compute_dtypes.rewrite_config("transformers.utils.quantization_config:BitsAndBytesConfig"),
    defect=defect,
)
