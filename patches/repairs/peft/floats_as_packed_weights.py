"""INT8 weights that are kept in floating point are used as if they were packed."""

from __future__ import annotations

from ...engine import CannotShow, Finding, Part, Patch, Rewrite
from ...engine.gate import satisfied
from ...quantized.weights import dequantized_in_place
from ..reproducers import tiny_models


def defect_peft() -> Finding:
    """Load a tiny Llama with weights in floating point, run it once, and merge an adapter that adds nothing."""
    import tempfile

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    if satisfied("peft<0.15"):
        raise CannotShow("peft 0.14 dequantizes on CUDA only")
    how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save_llama(folder)
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=how, device_map="cpu", **tiny_models.in_dtype(torch.float32)
        )
    ids = torch.arange(8)[None]
    try:
        with torch.no_grad():
            expected = model(ids).logits
            merged = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).merge_and_unload()
            error = ((merged(ids).logits - expected).norm() / expected.norm()).item()
    except (AttributeError, RuntimeError) as raised:
        return Finding(True, f"merge_and_unload(): {raised}")
    return Finding(error > 0.05, f"an adapter that adds nothing, merged: logits off by {error:.1e} of their norm")


_MODULE = "peft.utils.integrations:dequantize_module_weight"


_WEIGHT = "peft.utils.integrations:dequantize_bnb_weight"


_NAMES = {"_patches_holds_floats": dequantized_in_place.holds_floats}


def defect_dequantize() -> Finding:
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
    id="peft-floats-as-packed-weights",
    summary="merging, DoRA and dequantize() fail or are wrong on INT8 layers with llm_int8_has_fp16_weight=True",
    groups=("train", "merge", "layers", "save"),
    silent=True,
    links=(
        "https://github.com/huggingface/peft/blob/main/src/peft/utils/integrations.py",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/bitsandbytes.py",
    ),
    why="""
        DoRA, merging and dequantizing use INT8 weights that are kept in floating point as if they were packed. With
        ``llm_int8_has_fp16_weight=True`` a ``Linear8bitLt`` keeps its weight in floating point and quantizes it in
        each forward. Its class is the class of packed weights, and peft decides by the name of the class: it
        multiplies the values by row scales. Before the first forward there are no scales, and everything that needs
        the weight raises ``'NoneType' object has no attribute 'to'``: adding DoRA or PiSSA, and
        ``merge_and_unload()``. After a forward (``generate``, an evaluation), the results are silently wrong. The
        same happens to 4-bit and INT8 layers that were dequantized in place (``layer.weight.data = ...``). All
        releases with the function.

        ``dequantize()`` uses INT8 weights that are kept in floating point as if they were packed. With
        ``llm_int8_has_fp16_weight=True`` a ``Linear8bitLt`` keeps its weight in floating point.
        ``model.dequantize()`` decides by the class of the weight, the class of packed weights, and multiplies the
        values by row scales. Before the first forward there are none (``'NoneType' object has no attribute
        'view'``). After it every output is silently wrong. Layers that were dequantized in place are affected too.
        All releases.
    """,
    repair="""
        The repair looks at the contents: a floating-point weight is used as it is. Packed weights are dequantized
        as before.

        The repair looks at the contents: a floating-point weight is used as it is.
    """,
    former_ids=("peft-floats-as-codes", "transformers-floats-as-codes"),
    parts=(
        Part(
            "peft",
            ("peft>=0.15", "bitsandbytes>=0.46.1"),
            "0.21.2",
            (
                Rewrite(
                    _MODULE,
                    find="weight = module.weight",
                    replace="""
                weight = module.weight
                if _patches_holds_floats(weight):
                    return weight
            """,
                    names=_NAMES,
                ),
                Rewrite(
                    _WEIGHT,
                    find="cls_name = weight.__class__.__name__",
                    replace="""
                if _patches_holds_floats(weight):
                    return weight.data
                cls_name = weight.__class__.__name__
            """,
                    names=_NAMES,
                ),
            ),
            defect_peft,
        ),
        Part(
            "dequantize",
            ("transformers>=4.53", "bitsandbytes>=0.46.1"),
            "5.24.0",
            tuple(
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
            defect_dequantize,
        ),
    ),
)
