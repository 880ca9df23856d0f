"""Checkpoints of quantized experts that this plugin does not read, or not into the model that transformers made for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TRANSPOSED = re.compile(r"experts\.\w+_projs\.\d+\.weight\.absmax$")
_OURS = re.compile(r"experts\.\w+_proj\.\d+\.(weight\.absmax|SCB)$")


def transposed(keys: Iterable[str]) -> None:
    """Their rows are what comes out, those of the parameter what goes in."""
    for key in filter(_TRANSPOSED.search, keys):
        raise NotImplementedError(
            f"this checkpoint has {key}: experts of gpt-oss as transposed linear layers, which unsloth writes and transformers "
            "and this plugin do not read. Load it with unsloth, or quantize the original: patches.quantize_experts()."
        )


def parted(keys: Iterable[str]) -> None:
    """transformers divides the experts of some models into linear layers before it reads a quantized checkpoint (Llama 4)."""
    for key in filter(_OURS.search, keys):
        raise NotImplementedError(
            f"this checkpoint has {key}, and the model linear layers instead of one parameter of experts. The patch "
            "transformers-checkpoint-decides keeps the parameter: call patches.apply() before the model is loaded."
        )
