"""What was asked for when a model was quantized, and what the model is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .layers import Layer
from .records import Asked
from .tensors import dtype_name, is_instance_of
from .transformers_names import Naming


def read_requested_config(layers: list[Layer], naming: Naming) -> Asked | None:
    """None for a model that bitsandbytes did not quantize."""
    precision = next((how for how in ("load_in_4bit", "load_in_8bit") if naming.setting(how)), "")
    if not precision:
        return None
    given = naming.setting("llm_int8_skip_modules")
    linear = [layer for layer in layers if _is_linear(layer)]
    plain = [layer for layer in linear if not layer.weight.how]
    floating = [p for layer in layers for p in layer.module._parameters.values() if p is not None]
    return Asked(
        precision=precision.removeprefix("load_in_"),
        default_list=given is None,
        skip=tuple(given or ()),
        skipped=len(plain),
        of=len(linear),
        dtypes=dict(Counter(dtype_name(p) for p in floating if p.is_floating_point() and _is_plain(p))),
        compute=_compute(naming) if precision == "load_in_4bit" else "",
        threshold=naming.setting("llm_int8_threshold") if precision == "load_in_8bit" else None,
    )


def _is_linear(layer: Layer) -> bool:
    names = ("Linear", "Linear4bit", "Linear8bitLt", "Conv1D")
    return layer.kind in names or is_instance_of(layer.module, "torch.nn", "Linear")


def _is_plain(parameter: Any) -> bool:
    return type(parameter).__name__ not in ("Params4bit", "Int8Params")


def _compute(naming: Naming) -> str:
    return str(naming.setting("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
