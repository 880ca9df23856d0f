"""The warning that 4-bit layers compute in float32 by default, once a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..process.messages import LOGGER
from . import explicit_arguments

if TYPE_CHECKING:
    from torch.nn import Module

_told: set[str] = set()


def warn_of_float32(quantizer: Any, model: Module, replace: Any) -> Any:
    """Warn if the quantized layers of ``model`` compute in float32 by default; return ``replace``, which makes them."""
    import torch

    config = quantizer.quantization_config
    dtype = getattr(model, "dtype", None)
    if dtype in (torch.bfloat16, torch.float16) and config.bnb_4bit_compute_dtype is torch.float32:
        if not _told and not _chosen(quantizer):
            name = str(dtype)
            _told.add(name)
            where = "its checkpoint says so" if quantizer.pre_quantized else "the default of bnb_4bit_compute_dtype"
            LOGGER.warning(
                "The 4-bit layers of this %s compute in float32 (%s), the rest of it in %s. They cast their input "
                "and weight to float32 and cannot use the 16-bit units of a GPU, which is slower and needs more memory. "
                "Set BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=%s), or torch.float32 to keep it so without this warning.",
                type(model).__name__,
                where,
                name.removeprefix("torch."),
                name,
            )
    return replace


def _chosen(quantizer: Any) -> bool:
    """Tell whether the user chose the compute dtype, or may have."""
    names = explicit_arguments.explicit_names(quantizer.quantization_config)
    if quantizer.pre_quantized:  # the configuration in a file has every argument
        return names is not None and explicit_arguments.CHOSEN in names
    return names is None or explicit_arguments.COMPUTE in names
