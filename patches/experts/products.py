"""Products with quantized experts: one expert at a time (an accelerator dequantizes a few at once), if rows chose it.

In 4 bits it is dequantized. In INT8 the product with an expert is the one of ``Linear8bitLt``, and the product of the
backward dequantizes, as there. Which one it is says the orientation: the rows of an expert are its outputs.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from . import compiled_products
from .quantized_tensor import RULES, QuantizedExperts
from .row_products import make_room, multiply_by_choice, multiply_by_expert, multiply_by_group
from .views import aten, register_rule, transpose_matrices


@register_rule(aten.mm.default)
def multiply_matrices(left: torch.Tensor, right: torch.Tensor) -> Any:
    if _is_one(right) and not isinstance(left, QuantizedExperts):
        return multiply_by_expert(left, right, right.chosen)
    if _is_one(left) and not isinstance(right, QuantizedExperts) and left.packed.kind.int8:
        return multiply_matrices(right.t(), transpose_matrices(left)).t()
    return torch.mm(_dense(left), _dense(right))


def _is_one(tensor: torch.Tensor) -> TypeGuard[QuantizedExperts]:
    return isinstance(tensor, QuantizedExperts) and isinstance(tensor.chosen, int)


@register_rule(aten.addmm.default)
def add_product(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **scales: Any) -> Any:
    if isinstance(bias, QuantizedExperts):
        return NotImplemented
    if _is_one(right) and right.packed.kind.int8 and not scales:
        return bias + multiply_matrices(left, right)
    return torch.addmm(bias, _dense(left), _dense(right), **scales)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """One expert, or a tensor that is no expert."""
    return matrix.dequantize() if isinstance(matrix, QuantizedExperts) else matrix


@register_rule(aten.bmm.default)
def multiply_batches(left: torch.Tensor, right: torch.Tensor) -> Any:
    """(n, rows, in) @ (n, in, out), either side the experts."""
    if isinstance(left, QuantizedExperts) and isinstance(right, QuantizedExperts):
        return NotImplemented
    if isinstance(left, QuantizedExperts):
        return _chosen(left, right, left=True) if left.chosen is not None else _each(left, right, left=True)
    assert isinstance(right, QuantizedExperts)
    return _chosen(right, left, left=False) if right.chosen is not None else _each(right, left, left=False)


def _each(experts: QuantizedExperts, other: torch.Tensor, left: bool) -> torch.Tensor:
    """Every expert with its own matrix of ``other``."""
    if left and experts.packed.kind.int8:
        return _each(transpose_matrices(experts), other.transpose(1, 2), left=False).transpose(1, 2)
    out = make_room(experts, other, left)
    for number in range(experts.shape[0]):
        if experts.packed.kind.int8:
            out[number] = multiply_by_expert(other[number], experts, number)
            continue
        dense, matrix = experts.expert(number).unsqueeze(0), other[number : number + 1]
        out[number : number + 1] = torch.bmm(dense, matrix) if left else torch.bmm(matrix, dense)
    return out


def _chosen(experts: QuantizedExperts, other: torch.Tensor, left: bool) -> torch.Tensor:
    """Every matrix of ``other`` with the expert that was chosen for it: all of one expert in one product."""
    assert isinstance(experts.chosen, torch.Tensor)
    if left:  # (w @ x).T = x.T @ w.T
        return _chosen(experts.like(swapped=not experts.swapped), other.transpose(1, 2), left=False).transpose(1, 2)
    if compiled_products.is_traced(other, experts.chosen):
        return compiled_products.call_operator(other, experts.chosen, experts, grouped=False)
    return multiply_by_choice(other, experts)


def grouped_mm(
    rows: torch.Tensor, experts: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows sorted by expert; ``offs`` says where the rows of each expert end. Rows of no expert give zeros."""
    fits = isinstance(experts, QuantizedExperts) and experts.dim() == 3 and rows.dim() == 2
    if not fits or offs is None or bias is not None:
        return NotImplemented
    assert isinstance(experts, QuantizedExperts)
    if compiled_products.is_traced(rows, offs) and experts.chosen is None:
        out = compiled_products.call_operator(rows, offs, experts, grouped=True)
    else:
        out = multiply_by_group(rows, experts, offs)
    return out if out_dtype is None else out.to(out_dtype)


if hasattr(aten, "_grouped_mm"):  # since torch 2.7
    RULES[aten._grouped_mm.default] = grouped_mm


def register_transformers_operators() -> None:
    """Its own operator for grouped products, where torch has none; transformers defines it when it is imported."""
    for name, function in (
        ("grouped_mm_fallback", grouped_mm_fallback),
        ("grouped_mm_fallback_backward", grouped_mm_fallback_backward),
    ):
        operator = getattr(torch.ops.transformers, name, None)
        if operator is not None:
            RULES[operator.default] = function


def grouped_mm_fallback(rows: torch.Tensor, experts: Any, offs: torch.Tensor) -> Any:
    return grouped_mm(rows, experts, offs)


def grouped_mm_fallback_backward(rows: torch.Tensor, experts: Any, offs: torch.Tensor, gradient: torch.Tensor) -> Any:
    """The gradient of the rows; the unused gradient of packed weights takes no memory."""
    if not isinstance(experts, QuantizedExperts):
        return NotImplemented
    of_rows = grouped_mm(gradient, experts.like(swapped=not experts.swapped), offs)
    return of_rows, gradient.new_zeros(()).expand(experts.shape)
