"""Products with experts as operators of their own: what a compiled graph calls, for it cannot follow a loop over data.

All that an operator needs is in its arguments, so that a graph that outlives the process finds it there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from ..operators.code_digest import versioned_name
from .packed_experts import Layout, PackedExperts
from .quantized_tensor import QuantizedExperts, make_experts
from .row_products import multiply_by_choice, multiply_by_group


def is_traced(*tensors: torch.Tensor) -> bool:
    """Whether something is being traced: then these are no plain tensors."""
    return any(type(tensor) is not torch.Tensor for tensor in tensors)


def encode_layout(layout: Layout, names: list[str]) -> str:
    """``layout`` and the names of the tensors as a string."""
    shapes, kind = layout
    return json.dumps([shapes, [str(value) if isinstance(value, torch.dtype) else value for value in kind], names])


@functools.lru_cache
def decode_layout(text: str) -> tuple[Layout, tuple[str, ...]]:
    """What :func:`encode_layout` was given."""
    shapes, kind, names = json.loads(text)
    kind = tuple(getattr(torch, v[6:]) if str(v).startswith("torch.") else v for v in kind)
    parts = tuple(((part[0][0], part[0][1]), tuple(part[1])) for part in shapes)
    return (parts, kind), tuple(names)


def _experts_product(
    rows: torch.Tensor,
    where: torch.Tensor,
    tensors: list[torch.Tensor],
    layout: str,
    swapped: bool,
    dtype: torch.dtype,
    grouped: bool,
) -> torch.Tensor:
    """``rows`` sorted by expert, ``where`` the rows of each end; or a matrix of rows for each of the experts in ``where``."""
    parts, names = decode_layout(layout)
    packed = PackedExperts.laid_out(parts, dict(zip(names, tensors)))
    if grouped:
        return multiply_by_group(rows, make_experts(packed, None, swapped, dtype), where)
    return multiply_by_choice(rows, make_experts(packed, where, swapped, dtype))


def _shape_of(
    rows: torch.Tensor,
    where: torch.Tensor,
    tensors: list[torch.Tensor],
    layout: str,
    swapped: bool,
    dtype: torch.dtype,
    grouped: bool,
) -> torch.Tensor:
    (parts, _), _ = decode_layout(layout)
    columns = sum(shape[0] for shape, _ in parts) if swapped else parts[0][0][1]
    return rows.new_empty(*rows.shape[:-1], columns)


NAME = versioned_name("experts_product", _experts_product)
QuantizedExperts.graph_key = NAME  # a compiled graph on disk calls the operator
_library = torch.library.Library("bnb_patches", "FRAGMENT")
_library.define(
    f"{NAME}(Tensor rows, Tensor where, Tensor[] tensors, str layout, bool swapped, ScalarType dtype, bool grouped)"
    " -> Tensor"
)
_library.impl(NAME, _experts_product, "CompositeExplicitAutograd")
torch.library.register_fake(f"bnb_patches::{NAME}", _shape_of, lib=_library)

OPERATOR: Callable[..., torch.Tensor] = getattr(torch.ops.bnb_patches, NAME).default


def call_operator(rows: torch.Tensor, where: torch.Tensor, experts: Any, grouped: bool) -> torch.Tensor:
    """The operator on ``experts``."""
    tensors = experts.packed.tensors()
    layout = encode_layout(experts.packed.layout(), list(tensors))
    return OPERATOR(rows, where, list(tensors.values()), layout, experts.swapped, experts.dtype, grouped)
