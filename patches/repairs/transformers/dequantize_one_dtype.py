"""After training on a k-bit model, ``model.dequantize()`` gives a model with mixed dtypes, which cannot compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import load_quantized

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def dtype_of_the_rest(model: PreTrainedModel) -> torch.dtype:
    """Return the one dtype of all floating point parameters that are not quantized; ``config.dtype`` if they have several."""
    quantized = ("Params4bit", "Int8Params")
    rest = {p.dtype for p in model.parameters() if p.is_floating_point() and type(p).__name__ not in quantized}
    dtype: torch.dtype = rest.pop() if len(rest) == 1 else model.config.dtype
    return dtype


def defect() -> Finding:
    """Merge an adapter that was trained on a tiny 4-bit Llama, dequantize the model, and run it."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    plain = tiny_models.make_llama().to(torch.bfloat16)
    model = load_quantized(plain, how, device_map="cpu", **tiny_models.in_dtype(torch.bfloat16))
    model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(target_modules=["q_proj"]))
    plain = model.merge_and_unload().dequantize()
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in plain.parameters()}))
    try:
        plain(torch.arange(4)[None])
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        return Finding(True, f"parameters in {dtypes}; forward: {error}")
    return Finding(False, f"parameters in {dtypes}; forward computes")


PATCH = Patch(
    id="transformers-dequantize-one-dtype",
    summary="a model prepared for k-bit training, merged and dequantized mixes dtypes and cannot compute",
    groups=("merge", "layers"),
    messages=(
        Message(
            "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
            "torch/lib/libtorch_cpu.so",
            parts=("mat1 and mat2 must have the same dtype, but got",),
        ),
        Message(
            "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
            "figure",
            parts=("expected m1 and m2 to have the same dtype, but got",),
        ),
    ),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/base.py#L239",),
    why="""
        peft's ``prepare_model_for_kbit_training`` casts everything that is not quantized to float32. After
        training, ``merge_and_unload()`` and ``model.dequantize()`` should give a plain model. But ``dequantize``
        gives the formerly quantized weights ``config.dtype`` (bfloat16), "using the same dtype we used to load the
        model", while embeddings, norms, biases and head are float32 by then. The first forward raises ``mat1 and
        mat2 must have the same dtype, but got Float and BFloat16``, for 4 and 8 bits.
    """,
    repair="""
        The repair looks at the rest of the model. If all its floating-point parameters have one dtype, the
        dequantized weights get it too; widening is exact. If they have several (a model that keeps some modules in
        float32, for example), ``config.dtype`` decides as before. So does a dtype that the caller gives.
    """,
    requires=("transformers>=5", "bitsandbytes>=0.46", "peft"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.quantizers.base:HfQuantizer.dequantize", "model.config.dtype", dtype_of_the_rest, "model"
        ),
    ),
    defect=defect,
)
