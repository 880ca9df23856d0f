"""Rows times the experts that they chose: what eager calls, and the operators of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from . import int8_matrix
from .quantized_tensor import QuantizedExperts


def multiply_by_expert(rows: torch.Tensor, experts: QuantizedExperts, number: Any) -> torch.Tensor:
    """``rows`` times expert ``number`` of all, as this view shows it."""
    threshold = experts.packed.kind.threshold
    if threshold is None or not _in_int8(rows.dtype, experts):
        return torch.mm(rows, experts.expert(number))
    out = [int8_matrix.multiply_int8(rows, p.codes[number], p.absmax[number], threshold) for p in experts.packed.parts]
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def multiply_by_each(
    groups: Iterable[torch.Tensor], dtype: torch.dtype, experts: QuantizedExperts, numbers: Sequence[int]
) -> Iterator[torch.Tensor]:
    """For the rows (of ``dtype``) that chose each of ``numbers`` what :func:`multiply_by_expert` gives."""
    if _in_int8(dtype, experts):
        return (multiply_by_expert(rows, experts, number) for rows, number in zip(groups, numbers))
    return (torch.mm(rows, matrix) for rows, matrix in zip(groups, experts.each(numbers)))


def _in_int8(dtype: torch.dtype, experts: QuantizedExperts) -> bool:
    """Whether the product with rows of ``dtype`` is the one of ``Linear8bitLt``."""
    return experts.packed.kind.threshold is not None and experts.swapped and dtype == experts.dtype


def multiply_by_choice(other: torch.Tensor, experts: QuantizedExperts) -> torch.Tensor:
    """Each matrix of ``other`` with the expert that ``experts.chosen`` says."""
    assert isinstance(experts.chosen, torch.Tensor)
    out = make_room(experts, other, left=False)
    numbers = experts.chosen.unique().tolist()
    places = [(experts.chosen == number).nonzero()[:, 0] for number in numbers]
    groups = (other[where].flatten(0, 1) for where in places)
    for where, product in zip(places, multiply_by_each(groups, other.dtype, experts, numbers)):
        out[where] = product.view(len(where), other.shape[1], -1)
    return out


def multiply_by_group(rows: torch.Tensor, experts: QuantizedExperts, offs: torch.Tensor) -> torch.Tensor:
    """Rows up to ``offs[0]`` with the first expert, from there to ``offs[1]`` with the next, and so on."""
    out, ends = rows.new_zeros(rows.shape[0], experts.shape[2]), offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends)]
    numbers = [number for number, span in zip(experts.numbers(), spans) if span.stop > span.start]
    spans = [span for span in spans if span.stop > span.start]
    groups = (rows[span] for span in spans)
    for span, product in zip(spans, multiply_by_each(groups, rows.dtype, experts, numbers)):
        out[span] = product
    return out


def make_room(experts: QuantizedExperts, other: torch.Tensor, left: bool) -> torch.Tensor:
    sides = (experts.shape[1], other.shape[2]) if left else (other.shape[1], experts.shape[2])
    return other.new_empty(other.shape[0], *sides)
