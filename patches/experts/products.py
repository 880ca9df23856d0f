"""Products with quantized experts. Experts that rows chose are dequantized one at a time (a few at once on an accelerator).

4-bit experts are dequantized, then multiplied. INT8 experts are multiplied as ``Linear8bitLt`` does in the forward, and
dequantized in the backward, as there. The orientation tells the two apart: a stored row is an output feature, so ``x @ W.T``
(``swapped``) is a forward.

A compiled graph cannot follow a loop over data, so it calls one operator for the loop. All that the operator needs is in its
arguments, where a graph that outlives the process finds it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from ..operators.code_digest import versioned_name
from . import int8_matrix
from .packed_experts import Layout, PackedExperts
from .quantized_tensor import RULES, QuantizedExperts, make_experts
from .views import aten, register_rule, transpose_matrices

# -- rows times the experts that they chose ------------------------------------------------------------------------------


def multiply_by_expert(rows: torch.Tensor, experts: QuantizedExperts, number: Any) -> torch.Tensor:
    """Multiply ``rows`` by expert ``number`` of all, as this view shows it."""
    threshold = experts.packed.kind.threshold
    if threshold is None or not _in_int8(rows.dtype, experts):
        return torch.mm(rows, experts.expert(number))
    out = [int8_matrix.multiply_int8(rows, p.codes[number], p.absmax[number], threshold) for p in experts.packed.parts]
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def _multiply_by_each(
    groups: Iterable[torch.Tensor], dtype: torch.dtype, experts: QuantizedExperts, numbers: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Multiply each group of rows (of ``dtype``) by one of ``numbers``, as :func:`multiply_by_expert`."""
    if _in_int8(dtype, experts):
        return (multiply_by_expert(rows, experts, number) for rows, number in zip(groups, numbers))
    return (torch.mm(rows, matrix) for rows, matrix in zip(groups, experts.iter_dequantized(numbers)))


def _in_int8(dtype: torch.dtype, experts: QuantizedExperts) -> bool:
    """Tell whether the product with rows of ``dtype`` is the one of ``Linear8bitLt``."""
    return experts.packed.kind.threshold is not None and experts.swapped and dtype == experts.dtype


def multiply_by_choice(other: torch.Tensor, experts: QuantizedExperts) -> torch.Tensor:
    """Multiply each matrix of ``other`` by the expert that ``experts.chosen`` has for it."""
    assert isinstance(experts.chosen, torch.Tensor)
    out = _make_room(experts, other, left=False)
    numbers = experts.chosen.unique().tolist()
    indices = [(experts.chosen == number).nonzero()[:, 0] for number in numbers]
    groups = (other[rows].flatten(0, 1) for rows in indices)
    for rows, product in zip(indices, _multiply_by_each(groups, other.dtype, experts, numbers)):
        out[rows] = product.view(len(rows), other.shape[1], -1)
    return out


def multiply_by_group(rows: torch.Tensor, experts: QuantizedExperts, offs: torch.Tensor) -> torch.Tensor:
    """Multiply rows up to ``offs[0]`` by the first expert, from there to ``offs[1]`` by the next, and so on."""
    out, ends = rows.new_zeros(rows.shape[0], experts.shape[2]), offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends)]
    numbers = [number for number, span in zip(experts.numbers(), spans) if span.stop > span.start]
    spans = [span for span in spans if span.stop > span.start]
    groups = (rows[span] for span in spans)
    for span, product in zip(spans, _multiply_by_each(groups, rows.dtype, experts, numbers)):
        out[span] = product
    return out


def _make_room(experts: QuantizedExperts, other: torch.Tensor, left: bool) -> torch.Tensor:
    sides = (experts.shape[1], other.shape[2]) if left else (other.shape[1], experts.shape[2])
    return other.new_empty(other.shape[0], *sides)


# -- the operator of compiled graphs -------------------------------------------------------------------------------------


def encode_layout(layout: Layout, names: list[str]) -> str:
    """Write ``layout`` and the names of the tensors as a string."""
    shapes, kind = layout
    return json.dumps([shapes, [str(value) if isinstance(value, torch.dtype) else value for value in kind], names])


@functools.lru_cache
def decode_layout(text: str) -> tuple[Layout, tuple[str, ...]]:
    """Read the layout and the names that :func:`encode_layout` was given."""
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
    """Multiply rows by experts.

    ``grouped``: the rows are sorted by expert, and ``where`` has the end of each expert. Else each matrix of the batch is
    multiplied by the expert whose number ``where`` has for it.
    """
    decoded, names = decode_layout(layout)
    packed = PackedExperts.from_layout(decoded, dict(zip(names, tensors)))
    if grouped:
        return multiply_by_group(rows, make_experts(packed, None, swapped, dtype), where)
    return multiply_by_choice(rows, make_experts(packed, where, swapped, dtype))


def _shape_of(rows: torch.Tensor, where: Any, tensors: Any, layout: str, swapped: bool, *_: Any) -> torch.Tensor:
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


def _multiply(rows: torch.Tensor, where: torch.Tensor, experts: QuantizedExperts, grouped: bool) -> torch.Tensor:
    """Multiply by groups or by choice: at once for plain tensors, by the operator while something is traced."""
    if type(rows) is torch.Tensor and type(where) is torch.Tensor:
        return multiply_by_group(rows, experts, where) if grouped else multiply_by_choice(rows, experts)
    tensors = experts.packed.tensors()
    layout = encode_layout(experts.packed.layout(), list(tensors))
    return OPERATOR(rows, where, list(tensors.values()), layout, experts.swapped, experts.dtype, grouped)


# -- the operators that models call --------------------------------------------------------------------------------------


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
    """Return an expert in floating point, and any other tensor as it is."""
    return matrix.dequantize() if isinstance(matrix, QuantizedExperts) else matrix


@register_rule(aten.bmm.default)
def multiply_batches(left: torch.Tensor, right: torch.Tensor) -> Any:
    """Multiply (n, rows, in) by (n, in, out), either side the experts."""
    if isinstance(left, QuantizedExperts) and isinstance(right, QuantizedExperts):
        return NotImplemented
    if isinstance(right, QuantizedExperts):
        return _multiply_each(right, left, left=False)
    assert isinstance(left, QuantizedExperts)
    return _multiply_each(left, right, left=True)


def _multiply_each(experts: QuantizedExperts, other: torch.Tensor, left: bool) -> torch.Tensor:
    """Multiply each matrix of ``other`` by its own expert; where experts were chosen, all of one expert in one product."""
    if left and (experts.chosen is not None or experts.packed.kind.int8):  # (w @ x).T = x.T @ w.T
        return _multiply_each(transpose_matrices(experts), other.transpose(1, 2), left=False).transpose(1, 2)
    if isinstance(experts.chosen, torch.Tensor):
        return _multiply(other, experts.chosen, experts, grouped=False)
    out = _make_room(experts, other, left)
    for number in range(experts.shape[0]):
        if experts.packed.kind.int8:
            out[number] = multiply_by_expert(other[number], experts, number)
            continue
        dense, matrix = experts.expert(number).unsqueeze(0), other[number : number + 1]
        out[number : number + 1] = torch.bmm(dense, matrix) if left else torch.bmm(matrix, dense)
    return out


def grouped_mm(
    rows: torch.Tensor, experts: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Multiply rows sorted by expert; ``offs`` says where the rows of each expert end. Rows of no expert give zeros."""
    if not isinstance(experts, QuantizedExperts) or experts.dim() != 3 or rows.dim() != 2:
        return NotImplemented
    if offs is None or bias is not None:
        return NotImplemented
    if experts.chosen is None:
        out = _multiply(rows, offs, experts, grouped=True)
    else:
        out = multiply_by_group(rows, experts, offs)
    return out if out_dtype is None else out.to(out_dtype)


def grouped_mm_backward(rows: torch.Tensor, experts: Any, offs: torch.Tensor, gradient: torch.Tensor) -> Any:
    """Return the gradient of the rows; the unused gradient of packed weights takes no memory."""
    if not isinstance(experts, QuantizedExperts):
        return NotImplemented
    of_rows = grouped_mm(gradient, transpose_matrices(experts), offs)
    return of_rows, gradient.new_zeros(()).expand(experts.shape)


if hasattr(aten, "_grouped_mm"):  # since torch 2.7
    RULES[aten._grouped_mm.default] = grouped_mm


def register_transformers_operators() -> None:
    """Add rules for the grouped products of transformers, where torch has none: they are defined when it is imported."""
    for name, rule in (("grouped_mm_fallback", grouped_mm), ("grouped_mm_fallback_backward", grouped_mm_backward)):
        operator = getattr(torch.ops.transformers, name, None)
        if operator is not None:
            RULES[operator.default] = rule
