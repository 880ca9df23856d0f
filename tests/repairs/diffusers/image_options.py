"""What the tests of quantized image models share."""

from __future__ import annotations

from typing import Any

import torch

from patches.repairs.reproducers import image_models

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
INT8 = {"load_in_8bit": True}
BOTH = {"nf4": NF4, "int8": INT8}


def load(folder: Any, how: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16, **also: Any) -> Any:
    """Load the FLUX in ``folder`` whole on the CPU, as on a machine with a GPU; ``how`` are options of BitsAndBytesConfig."""
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    quantized = {} if how is None else {"quantization_config": BitsAndBytesConfig(**how)}
    with image_models.as_with_gpu():
        return FluxTransformer2DModel.from_pretrained(
            folder, **{"torch_dtype": dtype, "device_map": "cpu", **quantized, **also}
        )


def output(model: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with torch.no_grad():
        return model(**image_models.flux_inputs(dtype))[0]


def packed(model: Any) -> dict[str, torch.Tensor]:
    """The bytes of the quantized weights of ``model``, by name."""
    weights = {name: p for name, p in model.named_parameters() if type(p).__name__ in ("Params4bit", "Int8Params")}
    return {name: weight.data.clone() for name, weight in weights.items()}
