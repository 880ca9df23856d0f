"""INT8 weights that are kept in floating point are used as if they were packed."""

from __future__ import annotations

from ...engine import CannotShow, Finding, Part, Patch, Rewrite
from ...engine.gate import satisfied
from ...quantized.weights import dequantized_in_place
from ..reproducers.adapted_layer import relative_error
from ..reproducers.tiny_models import load_llama_int8


def defect_peft() -> Finding:
    """Load a tiny Llama with weights in floating point, run it once, and merge an adapter that adds nothing."""
    import tempfile

    import torch
    from peft import LoraConfig, get_peft_model

    if satisfied("peft<0.15"):
        raise CannotShow("peft 0.14 dequantizes on CUDA only")
    with tempfile.TemporaryDirectory() as folder:
        model = load_llama_int8(folder, llm_int8_has_fp16_weight=True)
    ids = torch.arange(8)[None]
    try:
        with torch.no_grad():
            expected = model(ids).logits
            merged = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).merge_and_unload()
            error = relative_error(merged(ids).logits, expected)
    except (AttributeError, RuntimeError) as raised:
        return Finding(True, f"merge_and_unload(): {raised}")
    return Finding(error > 0.05, f"an adapter that adds nothing, merged: logits off by {error:.1e} of their norm")


def defect_dequantize() -> Finding:
    """Load a tiny Llama with weights in floating point, and dequantize it."""
    import tempfile

    import torch
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = load_llama_int8(folder, llm_int8_has_fp16_weight=True)
        plain = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.arange(8)[None]
    try:
        with torch.no_grad():
            error = relative_error(model.dequantize()(ids).logits, plain(ids).logits)
    except (AttributeError, RuntimeError) as raised:
        return Finding(True, f"dequantize(): {raised}")
    return Finding(error > 0.01, f"logits after dequantize() are off by {error:.1e} of their norm")


_OF_TRANSFORMERS = "transformers.integrations.bitsandbytes:dequantize_bnb_weight"
_CLASS_NAME = "cls_name = weight.__class__.__name__"
_NAMES = {"_patches_holds_floats": dequantized_in_place.holds_floats}


def _return_floats(function: str, floats: str, when: str = "") -> Rewrite:
    """Return the edit of a function that goes by the name of the class of ``weight``: it returns ``floats`` before."""
    return Rewrite(
        function,
        find=_CLASS_NAME,
        replace=f"if _patches_holds_floats(weight):\n    return {floats}\n{_CLASS_NAME}",
        names=_NAMES,
        when=when,
    )


def _return_floats_of_module(condition: str, when: str) -> Rewrite:
    """Return the edit of peft's function that is given a layer: it returns the weight if ``condition`` is true."""
    return Rewrite(
        "peft.utils.integrations:dequantize_module_weight",
        find="weight = module.weight",
        replace=f"weight = module.weight\nif {condition}:\n    return weight",
        names=_NAMES,
        when=when,
    )


PATCH = Patch(
    id="peft-floats-as-packed-weights",
    summary="merging, DoRA and dequantize() fail or are wrong on INT8 layers with llm_int8_has_fp16_weight=True",
    groups=("train", "merge", "layers", "save"),
    silent=True,
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/utils/integrations.py",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py",
    ),
    why="""
        With ``llm_int8_has_fp16_weight=True`` a ``Linear8bitLt`` keeps its weight in floating point and quantizes
        it in each forward. Its class is the class of packed weights. peft (DoRA, PiSSA, merging) and
        ``dequantize()`` of transformers decide by the name of the class, and multiply the values by row scales.
        Before the first forward there are no scales: adding DoRA or PiSSA and ``merge_and_unload()`` raise
        ``'NoneType' object has no attribute 'to'``, and ``dequantize()`` ``'NoneType' object has no attribute
        'view'``. After a forward (``generate``, an evaluation), the results are silently wrong. The same happens to
        4-bit and INT8 layers that were dequantized in place (``layer.weight.data = ...``). All releases with these
        functions.
    """,
    repair="""
        The repair looks at the contents: a floating-point weight is used as it is. Packed weights are dequantized
        as before.
    """,
    former_ids=("peft-floats-as-codes", "transformers-floats-as-codes"),
    parts=(
        Part(
            "peft",
            ("peft>=0.15", "bitsandbytes>=0.46.1"),
            "0.21.2",
            (
                _return_floats_of_module("_patches_holds_floats(weight)", "torch>=2.8"),
                # There the question breaks the graph, and Dynamo fails where it goes on with a module: dequantize_bnb_weight asks.
                _return_floats_of_module(
                    "not torch.compiler.is_dynamo_compiling() and _patches_holds_floats(weight)", "torch<2.8"
                ),
                _return_floats("peft.utils.integrations:dequantize_bnb_weight", "weight.data"),
            ),
            defect_peft,
        ),
        Part(
            "dequantize",
            ("transformers>=4.53", "bitsandbytes>=0.46.1"),
            "5.24.0",
            (
                _return_floats(_OF_TRANSFORMERS, "weight.data", "transformers>=5"),
                _return_floats(_OF_TRANSFORMERS, "weight.data.to(dtype)", "transformers<5"),
            ),
            defect_dequantize,
        ),
    ),
)
