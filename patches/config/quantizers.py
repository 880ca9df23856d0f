"""The quantizers of transformers and diffusers for bitsandbytes: the edits that two share, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine import Rewrite

QUANTIZERS = (
    "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer",
    "transformers.quantizers.quantizer_bnb_8bit:Bnb8BitHfQuantizer",
)
QUANTIZERS_OF_DIFFUSERS = (
    "diffusers.quantizers.bitsandbytes.bnb_quantizer:BnB4BitDiffusersQuantizer",
    "diffusers.quantizers.bitsandbytes.bnb_quantizer:BnB8BitDiffusersQuantizer",
)
BEFORE_LOADING = "_process_model_before_weight_loading"
AFTER_LOADING = "_process_model_after_weight_loading"


def rewrite_both_quantizers(
    method: str, find: str, replace: str, function: Callable[..., Any], when: str = ""
) -> tuple[Rewrite, ...]:
    """Rewrite ``method`` of the 4-bit and of the INT8 quantizer; ``replace`` has ``function`` by its name after _patches_."""
    names = {f"_patches_{function.__name__}": function}
    return tuple(
        Rewrite(f"{quantizer}.{method}", find=find, replace=replace, names=names, when=when) for quantizer in QUANTIZERS
    )


def makes_parameter(quantizer: Any, model: Any, name: str) -> bool:
    """Tell whether ``quantizer`` makes the parameter ``name`` of ``model``, from a weight or from packed weights."""
    upstream = getattr(quantizer, "param_needs_quantization", None)
    if upstream is not None:
        return bool(upstream(model, name))
    path, _, own = name.rpartition(".")  # up to transformers 4.56, and in diffusers, it asks for a state dict, too
    return own == "weight" and type(model.get_submodule(path)._parameters[own]).__name__ in ("Params4bit", "Int8Params")


def reads_packed_weights(conversion: Any) -> bool:
    """Tell whether ``conversion`` of transformers 5 joins a quantized parameter from the tensors that its layer writes."""
    operations = getattr(conversion, "operations", None) or ()
    return any(type(operation).__name__ in ("Bnb4bitDeserialize", "Bnb8bitDeserialize") for operation in operations)


def is_bitsandbytes(quantizer: Any) -> bool:
    """Tell whether ``quantizer``, which may be None, is a quantizer of transformers or diffusers for bitsandbytes."""
    config = getattr(quantizer, "quantization_config", None)
    return getattr(config, "quant_method", None) == "bitsandbytes"


def names_precision(quantizer: Any) -> bool:
    """Tell whether the configuration of ``quantizer``, which may be None, names 4 bits or INT8.

    ``BitsAndBytesConfig()`` names neither: transformers quantizes linear layers by it, and experts stay as they are.
    """
    config = getattr(quantizer, "quantization_config", None)
    return bool(getattr(config, "load_in_4bit", False) or getattr(config, "load_in_8bit", False))
