"""Products with experts in 4 bits: one expert is dequantized at a time, and only if rows chose it."""

from __future__ import annotations

from typing import Any

import torch

from . import compiled
from .tensor import RULES, Experts4bit
from .views import aten, rule


@rule(aten.mm.default)
def mm(left: torch.Tensor, right: torch.Tensor) -> Any:
    return torch.mm(_dense(left), _dense(right))


@rule(aten.addmm.default)
def addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **scales: Any) -> Any:
    if isinstance(bias, Experts4bit):
        return NotImplemented
    return torch.addmm(bias, _dense(left), _dense(right), **scales)


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """One expert, or what is no expert."""
    return matrix.dequantize() if isinstance(matrix, Experts4bit) else matrix


@rule(aten.bmm.default)
def bmm(left: torch.Tensor, right: torch.Tensor) -> Any:
    """(n, rows, in) @ (n, in, out), either side the experts."""
    if isinstance(left, Experts4bit) and isinstance(right, Experts4bit):
        return NotImplemented
    if isinstance(left, Experts4bit):
        return _chosen(left, right, left=True) if left.chosen is not None else _each(left, right, left=True)
    assert isinstance(right, Experts4bit)
    return _chosen(right, left, left=False) if right.chosen is not None else _each(right, left, left=False)


def _each(experts: Experts4bit, other: torch.Tensor, left: bool) -> torch.Tensor:
    """Every expert with its own matrix of ``other``."""
    out = _room(experts, other, left)
    for number in range(experts.shape[0]):
        dense, matrix = experts.expert(number).unsqueeze(0), other[number : number + 1]
        out[number : number + 1] = torch.bmm(dense, matrix) if left else torch.bmm(matrix, dense)
    return out


def _chosen(experts: Experts4bit, other: torch.Tensor, left: bool) -> torch.Tensor:
    """Every matrix of ``other`` with the expert that was chosen for it: all of one expert in one product."""
    assert isinstance(experts.chosen, torch.Tensor)
    if left:  # (w @ x).T = x.T @ w.T
        return _chosen(experts.like(swapped=not experts.swapped), other.transpose(1, 2), left=False).transpose(1, 2)
    if compiled.traced(other, experts.chosen):
        return compiled.product(other, experts.chosen, experts, grouped=False)
    return by_choice(other, experts)


def by_choice(other: torch.Tensor, experts: Experts4bit) -> torch.Tensor:
    """Each matrix of ``other`` with the expert that ``experts.chosen`` says."""
    assert isinstance(experts.chosen, torch.Tensor)
    out = _room(experts, other, left=False)
    for number in experts.chosen.unique().tolist():
        where = (experts.chosen == number).nonzero()[:, 0]
        rows = other[where]
        out[where] = torch.mm(rows.flatten(0, 1), experts.expert(number)).view(*rows.shape[:2], -1)
    return out


def _room(experts: Experts4bit, other: torch.Tensor, left: bool) -> torch.Tensor:
    sides = (experts.shape[1], other.shape[2]) if left else (other.shape[1], experts.shape[2])
    return other.new_empty(other.shape[0], *sides)


def grouped_mm(
    rows: torch.Tensor, experts: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows sorted by expert; ``offs`` says where those of each expert end. Rows of no expert give zeros."""
    fits = isinstance(experts, Experts4bit) and experts.dim() == 3 and rows.dim() == 2
    if not fits or offs is None or bias is not None:
        return NotImplemented
    assert isinstance(experts, Experts4bit)
    if compiled.traced(rows, offs) and experts.chosen is None:
        out = compiled.product(rows, offs, experts, grouped=True)
    else:
        out = by_group(rows, experts, offs)
    return out if out_dtype is None else out.to(out_dtype)


if hasattr(aten, "_grouped_mm"):  # since torch 2.7
    RULES[aten._grouped_mm.default] = grouped_mm


def by_group(rows: torch.Tensor, experts: Experts4bit, offs: torch.Tensor) -> torch.Tensor:
    """Rows up to ``offs[0]`` with the first expert, from there to ``offs[1]`` with the next, and so on."""
    out, start = rows.new_zeros(rows.shape[0], experts.shape[2]), 0
    for number, end in zip(experts.numbers(), offs.tolist()):
        if end > start:
            out[start:end] = torch.mm(rows[start:end], experts.expert(number))
        start = end
    return out


def know_transformers() -> None:
    """Its own operator for grouped products, where torch has none; transformers defines it when it is imported."""
    for name, function in (("grouped_mm_fallback", fallback), ("grouped_mm_fallback_backward", fallback_backward)):
        operator = getattr(torch.ops.transformers, name, None)
        if operator is not None:
            RULES[operator.default] = function


def fallback(rows: torch.Tensor, experts: Any, offs: torch.Tensor) -> Any:
    return grouped_mm(rows, experts, offs)


def fallback_backward(rows: torch.Tensor, experts: Any, offs: torch.Tensor, gradient: torch.Tensor) -> Any:
    """The gradient of the rows; that of packed weights, which nobody asks for, takes no memory."""
    if not isinstance(experts, Experts4bit):
        return NotImplemented
    of_rows = grouped_mm(gradient, experts.like(swapped=not experts.swapped), offs)
    return of_rows, gradient.new_zeros(()).expand(experts.shape)
