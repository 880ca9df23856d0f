"""Loading a quantized checkpoint with layers on the CPU or the disk asks for a flag that was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers import tiny_models
from ..reproducers.quantized_models import save_quantized

_REMEDY = (
    "This checkpoint is quantized already, and from_pretrained cannot send layers of such a checkpoint to the CPU or "
    'the disk, whatever llm_int8_enable_fp32_cpu_offload says. Load it whole (device_map={"": "cpu"} needs no GPU '
    'memory), then call accelerate.dispatch_model(model, device_map, offload_dir="...", force_hooks=True) with this device map.'
)


def error_with_remedy(quantizer: Any) -> Callable[[str], ValueError]:
    """Return ``ValueError``; if the flag that its text asks for would have no effect, it says what works instead."""

    def error(text: str) -> ValueError:
        asks = quantizer.pre_quantized and "llm_int8_enable_fp32_cpu_offload" in text
        return ValueError(_REMEDY if asks else text)

    return error


def defect() -> Finding:
    """Follow the advice that loading a quantized checkpoint gives."""
    import tempfile

    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as quantized:
        save_quantized(quantized, tiny_models.make_llama(), BitsAndBytesConfig(load_in_8bit=True), device_map="cpu")
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=True)
        try:
            device_map = {"model": "disk", "lm_head": "cpu"}
            AutoModelForCausalLM.from_pretrained(quantized, quantization_config=config, device_map=device_map)
        except ValueError as error:
            again = "you need to set `llm_int8_enable_fp32_cpu_offload=True`" in str(error)
            return Finding(
                again, f"the error says to {'set the flag that was set' if again else 'dispatch after loading'}"
            )
    return Finding(False, "loaded")


PATCH = Patch(
    id="transformers-refuses-offloaded-checkpoint",
    summary="loading a quantized checkpoint with layers on CPU or disk asks for a flag that was given",
    groups=("offload",),
    messages=(
        Message(
            "Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model. If you want to dispatch the model on the CPU or the disk while keeping these modules in 32-bit, you need to set `llm_int8_enable_fp32_cpu_offload=True` and pass a custom `device_map` to `from_pretrained`.",
            "transformers/quantizers/quantizer_bnb_4bit.py",
            parts=("Some modules are dispatched on the CPU or the disk.",),
        ),
    ),
    links=(
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/quantizers/quantizer_bnb_4bit.py",
    ),
    why="""
        ``validate_environment`` of the bitsandbytes quantizers raises ``you need to set
        llm_int8_enable_fp32_cpu_offload=True``. For a checkpoint that is already quantized, the configuration in
        its ``config.json`` replaces the one that the user passes, including this flag. Users who follow the advice
        get the same error again. All releases since 4.53.
    """,
    repair="""
        ``from_pretrained`` reads no row scales and no quantization state for a layer on the disk, so it is right to
        refuse, unless ``transformers-device-map-refused`` is applied, which loads such a model. With the repair the
        error says what works, with the same result bit for bit: load the whole model, then call ``dispatch_model``.
        A model that is quantized while it is loaded is asked for the flag as before.
    """,
    requires=("transformers>=4.53", "bitsandbytes>=0.46.1", "accelerate>=0.26.1"),
    tested_up_to="5.24.0",
    edits=tuple(
        Rewrite.to_call(
            f"transformers.quantizers.quantizer_bnb_{bits}bit:Bnb{bits}BitHfQuantizer.validate_environment",
            find="ValueError",
            function=error_with_remedy,
            arguments="self",
            when=when,
            count=errors,
        )
        for bits, errors, when in (
            (4, 1, "transformers>=5"),
            (8, 1, "transformers>=5"),
            (4, 2, "transformers<5"),
            (8, 3, "transformers<5"),
        )
    ),
    defect=defect,
)
