"""4-bit layers of a bf16 image model that is loaded in fp16 dequantize to bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config import quantizers
from ...engine import Finding, Patch, Rewrite
from ...quantized.four_bit import state_dtypes
from ..reproducers import image_models

if TYPE_CHECKING:
    import torch


def finish_loading(quantizer: Any, model: Any, dtype: torch.dtype | None) -> Any:
    """Call ``postprocess_model``, and give the quantization states of a checkpoint the dtype that was asked for."""
    if quantizer.pre_quantized and quantizers.is_bitsandbytes(quantizer):
        state_dtypes.set_below(model, dtype, lambda module: None)
    return quantizer.postprocess_model(model)


def defect() -> Finding:
    """Save a tiny FLUX of bf16 in 4 bits, load it in float16, and dequantize a layer."""
    import tempfile

    import torch
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as packed, image_models.as_with_gpu():
        image_models.save_flux(plain)
        options: dict[str, Any] = {"torch_dtype": torch.bfloat16, "device_map": "cpu"}
        FluxTransformer2DModel.from_pretrained(plain, quantization_config=how, **options).save_pretrained(packed)
        model = FluxTransformer2DModel.from_pretrained(packed, torch_dtype=torch.float16, device_map="cpu")
    dtype = model.x_embedder.weight.quant_state.dtype
    return Finding(dtype is not torch.float16, f"asked for torch.float16, weights are dequantized in {dtype}")


PATCH = Patch(
    id="diffusers-quant-state-dtype",
    summary="4-bit layers of a bf16 image model loaded in fp16 dequantize to bf16",
    groups=("from_pretrained", "merge"),
    silent=True,
    links=("https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/modeling_utils.py",),
    why="""
        A 4-bit layer dequantizes its weight in the dtype of its quantization state, which is read from the file. If
        a 4-bit FLUX of bf16 is loaded with ``torch_dtype=torch.float16``, as on a T4, or in float32, each weight is
        first rounded to the 8 bits of bf16 and then cast. Merging an adapter reads bf16 from such a model, and a
        model that is saved again has bf16 in each quantization state. All releases.
    """,
    repair="""
        The repair gives the quantization states the dtype in which the rest of the model is loaded, as with
        transformers (``transformers-quant-state-dtype``). Packed weights and absmax stay the same. If both dtypes
        are the same, and for a model that is quantized while it is loaded, nothing changes.
    """,
    requires=("diffusers>=0.33", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        Rewrite.to_call(
            "diffusers.models.modeling_utils:ModelMixin.from_pretrained",
            find="hf_quantizer.postprocess_model(model)",
            function=finish_loading,
            arguments="hf_quantizer, model, torch_dtype",
        ),
    ),
    defect=defect,
)
