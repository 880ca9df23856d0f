"""Quantized experts with all that operators do with them: where the other files take them from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from . import products
from .packed_experts import Layout, PackedExperts
from .quantized_tensor import Experts4bit, Experts8bit, QuantizedExperts, make_experts

__all__ = [
    "Experts4bit",
    "Experts8bit",
    "QuantizedExperts",
    "as_parameter",
    "make_experts",
    "products",
    "rebuild_from_pickle",
]

_IN_FILES_OF_1_1 = "bnb_patches.repairs.helpers.experts.tensor.rebuilt"


def as_parameter(packed: PackedExperts, dtype: torch.dtype | None = None, swapped: bool = False) -> torch.nn.Parameter:
    """Make the parameter of a module of experts, which shows ``dtype``, and each matrix transposed if ``swapped``."""
    packed = replace(packed, kind=replace(packed.kind, transposed=swapped))
    return torch.nn.Parameter(make_experts(packed, swapped=swapped, dtype=dtype), requires_grad=False)


def rebuild_from_pickle(
    layout: Layout, tensors: dict[str, torch.Tensor], chosen: Any, swapped: bool, dtype: torch.dtype, parameter: bool
) -> torch.Tensor:
    """Rebuild experts for a pickle, of plain arguments that ``torch.load(weights_only=True)`` reads."""
    tensor = make_experts(PackedExperts.from_layout(layout, tensors), chosen, swapped, dtype)
    return torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor


QuantizedExperts.rebuild = staticmethod(rebuild_from_pickle)
torch.serialization.add_safe_globals([rebuild_from_pickle, (rebuild_from_pickle, _IN_FILES_OF_1_1)])
