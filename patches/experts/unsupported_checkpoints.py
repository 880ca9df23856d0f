"""Checkpoints of quantized experts that cannot be read into the model that transformers made for them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OURS = re.compile(r"experts\.\w+_proj\.\d+\.(weight\.absmax|SCB)$")


def refuse_divided_experts(keys: Iterable[str]) -> None:
    """transformers divides the experts of some models into linear layers before it reads a quantized checkpoint (Llama 4)."""
    for key in filter(_OURS.search, keys):
        raise NotImplementedError(
            f"this checkpoint has {key}, but transformers has made linear layers of the experts. The patch "
            "transformers-skip-list-of-checkpoint prevents that: call patches.apply() before the model is loaded."
        )
