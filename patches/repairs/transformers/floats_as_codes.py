"""``dequantize()`` uses INT8 weights that are kept in floating point as if they were packed.

With ``llm_int8_has_fp16_weight=True`` a ``Linear8bitLt`` keeps its weight in floating point. ``model.dequantize()``
decides by the class of the weight, which is that of packed weights, and multiplies the values by row scales. Before
the first forward there are none (``'NoneType' object has no attribute 'view'``). After it every output is silently
wrong. Layers that were dequantized in place are affected too. All releases.

The repair looks at the contents: a floating-point weight is used as it is.
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...quantized.weights import dequantized_in_place
from ..reproducers import tiny_models


def defect() -> Finding:
    """Load a tiny Llama with weights in floating point, and dequantize it."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_llama(folder)
        plain = LlamaForCausalLM.from_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=how, device_map="cpu", **tiny_models.in_dtype(torch.float32)
        )
    ids = torch.arange(8)[None]
    try:
        with torch.no_grad():
            expected, found = plain(ids).logits, model.dequantize()(ids).logits
    except (AttributeError, RuntimeError) as raised:
        return Finding(True, f"dequantize(): {raised}")
    error = ((found - expected).norm() / expected.norm()).item()
    return Finding(error > 0.01, f"logits after dequantize() are off by {error:.1e} of their norm")


PATCH = Patch(
    id="transformers-floats-as-codes",
    summary="dequantize() fails or is wrong on INT8 models with llm_int8_has_fp16_weight=True",
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py",),
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    seen_on=("2.13",),
    edits=tuple(
        Rewrite(
            "transformers.integrations.bitsandbytes:dequantize_bnb_weight",
            find="cls_name = weight.__class__.__name__",
            replace=f"""
                if _patches_holds_floats(weight):
                    return {numbers}
                cls_name = weight.__class__.__name__
            """,
            names={"_patches_holds_floats": dequantized_in_place.holds_floats},
            when=when,
        )
        for numbers, when in (("weight.data", "transformers>=5"), ("weight.data.to(dtype)", "transformers<5"))
    ),
    defect=defect,
)
