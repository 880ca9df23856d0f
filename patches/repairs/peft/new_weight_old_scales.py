"""A new INT8 weight is read with the row scales of the old one."""

from __future__ import annotations

from ...engine import Finding, Part, Patch, Rewrite
from ...quantized.int8 import row_scales
from ..reproducers.adapted_layer import quantized_layer, relative_error
from ..reproducers.tiny_models import load_llama_int8


def defect_peft() -> Finding:
    """Run a layer, give it a new quantized weight, and merge an adapter that adds nothing."""
    import torch
    from bitsandbytes.nn import Int8Params
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Sequential(quantized_layer(int8=True, outputs=32, bias=False))
    x, new = torch.randn(4, 64), torch.randn(32, 64) * torch.logspace(-1, 1, 32)[:, None]
    model(x)
    model[0].weight = Int8Params(new, requires_grad=False, has_fp16_weights=False).to("cpu")
    model.is_loaded_in_8bit = True  # type: ignore[assignment]
    with torch.no_grad():
        merged = get_peft_model(model, LoraConfig(r=2, target_modules=["0"])).merge_and_unload()
        error = relative_error(merged(x), x @ new.T)
    return Finding(error > 0.1, f"an adapter that adds nothing, merged: output off by {error:.1e} of its norm")


def defect_dequantize() -> Finding:
    """Load a tiny Llama, run it, give one layer a new quantized weight, and dequantize it."""
    import tempfile

    import torch
    from bitsandbytes.nn import Int8Params

    with tempfile.TemporaryDirectory() as folder:
        model = load_llama_int8(folder)
    model(torch.arange(8)[None])
    layer = model.model.layers[0].mlp.up_proj
    new = torch.randn(layer.weight.shape) * torch.logspace(-1, 1, len(layer.weight))[:, None]
    layer.weight = Int8Params(new, requires_grad=False, has_fp16_weights=False).to("cpu")
    error = relative_error(model.dequantize().model.layers[0].mlp.up_proj.weight.float(), new)
    return Finding(error > 0.1, f"the dequantized weight is off by {error:.1e} of its norm")


_OF_PEFT = "peft.utils.integrations:dequantize_bnb_weight"


def _current_scales(function: str, moved: str = "", when: str = "") -> Rewrite:
    """Return the edit of a function that dequantizes an INT8 ``weight`` by the scales of ``state``, ``moved`` or not."""
    dequantize = f"bnb.functional.int8_vectorwise_dequant(weight.data, {{}}{moved})"
    return Rewrite(
        function,
        find=dequantize.format("state.SCB"),
        replace=dequantize.format("_patches_current_scales(weight, state)"),
        names={"_patches_current_scales": row_scales.current_scales},
        when=when,
    )


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
        From its first forward on, a ``Linear8bitLt`` computes with ``layer.state``. A weight that is assigned later
        (``layer.weight = Int8Params(...).to("cpu")``, or floats followed by ``model.to(device)``) brings its own
        packed weights and row scales, which the next forward takes. Before that forward, merging and DoRA of peft
        and ``dequantize()`` of transformers multiply the new packed weights by the old scales in
        ``layer.state.SCB``. A merged model or a dequantized layer silently computes wrong numbers. All releases.
    """,
    repair="""
        The repair reads the scales of the new weight. Before the first forward, and after the next one, nothing
        changes.
    """,
    former_ids=("transformers-new-weight-old-scales",),
    parts=(
        Part(
            "peft",
            ("peft>=0.15", "bitsandbytes>=0.46.1"),
            "0.21.2",
            (
                _current_scales(_OF_PEFT, when="peft<0.20"),
                _current_scales(_OF_PEFT, ".to(weight.data.device)", when="peft>=0.20"),
            ),
            defect_peft,
        ),
        Part(
            "dequantize",
            ("transformers>=4.53", "bitsandbytes>=0.46.1"),
            "5.24.0",
            (_current_scales("transformers.integrations.bitsandbytes:dequantize_bnb_weight"),),
            defect_dequantize,
        ),
    ),
)
