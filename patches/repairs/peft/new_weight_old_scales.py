"""A new INT8 weight is read with the row scales of the old one."""

from __future__ import annotations

from ...engine import Finding, Part, Patch, Rewrite
from ...quantized.int8 import row_scales
from ..reproducers import tiny_models


def defect_peft() -> Finding:
    """Run a layer, give it a new quantized weight, and merge an adapter that adds nothing."""
    import bitsandbytes as bnb
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)).to("cpu")
    x, new = torch.randn(4, 64), torch.randn(32, 64) * torch.logspace(-1, 1, 32)[:, None]
    model(x)
    model[0].weight = bnb.nn.Int8Params(new, requires_grad=False, has_fp16_weights=False).to("cpu")
    model.is_loaded_in_8bit = True  # type: ignore[assignment]
    with torch.no_grad():
        merged = get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).merge_and_unload()
        error = ((merged(x) - x @ new.T).norm() / (x @ new.T).norm()).item()
    return Finding(error > 0.1, f"an adapter that adds nothing, merged: output off by {error:.1e} of its norm")


def defect_dequantize() -> Finding:
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
    id="peft-new-weight-old-scales",
    summary="merging, DoRA and dequantize() read a new INT8 weight with the row scales of the old one",
    groups=("merge", "train", "layers", "save"),
    silent=True,
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/utils/integrations.py",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py",
    ),
    why="""
        Merging and DoRA read a new INT8 weight with the row scales of the old one. From its first forward on, a
        ``Linear8bitLt`` computes with ``layer.state``. A weight that is assigned later (``layer.weight =
        Int8Params(...).to("cpu")``, or floats followed by ``model.to(device)``) brings its own packed weights and
        row scales, which the next forward takes. Before that forward, ``dequantize_bnb_weight`` of peft multiplies
        the new packed weights by the old scales in ``layer.state.SCB``, and a merged model silently computes wrong
        numbers. All releases.

        ``dequantize()`` reads a new INT8 weight with the row scales of the old one. From its first forward on, a
        ``Linear8bitLt`` computes with ``layer.state``. A weight that is assigned later (``layer.weight =
        Int8Params(...).to("cpu")``, or floats followed by ``model.to(device)``) brings its own packed weights and
        row scales, which the next forward takes. Before that forward, ``dequantize_bnb_weight`` of transformers
        multiplies the new packed weights by the old scales in ``layer.state.SCB``, and the dequantized layer
        silently computes wrong numbers. All releases.
    """,
    repair="""
        The repair reads the scales of the new weight. Before the first forward, and after the next one, nothing
        changes.

        The repair reads the scales of the new weight. Before the first forward, and after the next one, nothing
        changes.
    """,
    former_ids=("transformers-new-weight-old-scales",),
    parts=(
        Part(
            "peft",
            ("peft>=0.15", "bitsandbytes>=0.46.1"),
            "0.21.2",
            tuple(
                Rewrite(
                    "peft.utils.integrations:dequantize_bnb_weight",
                    find=f"bnb.functional.int8_vectorwise_dequant(weight.data, state.SCB{moved})",
                    replace=f"bnb.functional.int8_vectorwise_dequant(weight.data, _patches_current_scales(weight, state){moved})",
                    names={"_patches_current_scales": row_scales.current_scales},
                    when=when,
                )
                for moved, when in (("", "peft<0.20"), (".to(weight.data.device)", "peft>=0.20"))
            ),
            defect_peft,
        ),
        Part(
            "dequantize",
            ("transformers>=4.53", "bitsandbytes>=0.46.1"),
            "5.24.0",
            (
                Rewrite(
                    "transformers.integrations.bitsandbytes:dequantize_bnb_weight",
                    find="bnb.functional.int8_vectorwise_dequant(weight.data, state.SCB)",
                    replace="bnb.functional.int8_vectorwise_dequant(weight.data, _patches_current_scales(weight, state))",
                    names={"_patches_current_scales": row_scales.current_scales},
                ),
            ),
            defect_dequantize,
        ),
    ),
)
