"""How peft makes an adapter for a quantized layer: in which dtype, and by which methods it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..process import call_stack
from ..quantized.int8 import row_scales
from ..quantized.weights import dense_weight

if TYPE_CHECKING:
    import torch

CONVERTED = (
    "Make the adapter on the model loaded without quantization_config, save it with "
    "save_pretrained(folder, path_initial_model_for_weight_conversion=...), and load that onto the quantized model"
)
"""The remedy where a plain LoRA adapter can hold what the option changes in the base weight."""
AFTERWARDS = (
    "Leave the option out, and call peft.replace_lora_weights_loftq(model) after get_peft_model; or make the adapter on the "
    "model loaded without quantization_config, and save it with init_lora_weights=True in its configuration"
)
"""The remedy for LoftQ, which peft has for packed weights too."""
UNQUANTIZED = "Load the model without quantization_config, or leave the option out"
"""The remedy where nothing but the changed base weight can."""


def refuse_if_packed(layer: Any, option: str, remedy: str, does: str = "replaces the weight of its layer") -> Any:
    """Return ``layer``, or raise an error if its weight is packed, which ``option`` of peft cannot work with.

    Raises
    ------
    ValueError
        Names the layer and the option, and says what works: ``remedy``.
    """
    if what := dense_weight.describe_packing(layer):
        name = call_stack.target_name() or row_scales.name_of(layer)
        raise ValueError(f"{option} {does}, but {type(layer).__name__} {name!r} holds {what}. {remedy}")
    return layer


def adapter_dtype(tuner: Any) -> torch.dtype:
    """Return the dtype for an adapter on the base layer of ``tuner``: the dtype of the weight, or the compute dtype of packed weights.

    A ``Linear4bit`` computes in its ``compute_dtype``. A ``Linear8bitLt`` has none: torch's default dtype, in which peft
    makes adapters.
    """
    import torch

    layer = tuner.get_base_layer()
    if not dense_weight.describe_packing(layer):
        dtype: torch.dtype = layer.weight.dtype
        return dtype
    return getattr(layer, "compute_dtype", None) or torch.get_default_dtype()
