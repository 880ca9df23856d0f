"""``dequantize()`` reads a new INT8 weight with the row scales of the old one.

From its first forward on, a ``Linear8bitLt`` computes with ``layer.state``. A weight that is assigned later
(``layer.weight = Int8Params(...).to("cpu")``, or floats followed by ``model.to(device)``) brings its own packed
weights and row scales, which the next forward takes. Before that forward, ``dequantize_bnb_weight`` of transformers
multiplies the new packed weights by the old scales in ``layer.state.SCB``, and the dequantized layer silently computes
wrong numbers. All releases.

The repair reads the scales of the new weight. Before the first forward, and after the next one, nothing changes.
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...quantized.int8 import row_scales
from ..reproducers import tiny_models


def defect() -> Finding:
    """Load a tiny Llama, run it, give one layer a new quantized weight, and dequantize it."""
    import tempfile

    import torch
    from bitsandbytes.nn import Int8Params
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_8bit=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_llama(folder)
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=how, device_map="cpu", **tiny_models.in_dtype(torch.float32)
        )
    model(torch.arange(8)[None])
    layer = model.model.layers[0].mlp.up_proj
    new = torch.randn(layer.weight.shape) * torch.logspace(-1, 1, len(layer.weight))[:, None]
    layer.weight = Int8Params(new, requires_grad=False, has_fp16_weights=False).to("cpu")
    found = model.dequantize().model.layers[0].mlp.up_proj.weight.float()
    error = ((found - new).norm() / new.norm()).item()
    return Finding(error > 0.1, f"the dequantized weight is off by {error:.1e} of its norm")


PATCH = Patch(
    id="transformers-new-weight-old-scales",
    summary="dequantize() reads a new INT8 weight with the row scales of the old one",
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py",),
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "transformers.integrations.bitsandbytes:dequantize_bnb_weight",
            find="bnb.functional.int8_vectorwise_dequant(weight.data, state.SCB)",
            replace="bnb.functional.int8_vectorwise_dequant(weight.data, _patches_current_scales(weight, state))",
            names={"_patches_current_scales": row_scales.current_scales},
        ),
    ),
    defect=defect,
)
