"""What an operation does with :class:`~.adapted_experts.AdaptedExperts` in the place of forming them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .adapted_experts import RULES, AdaptedExperts, Factors, Rule


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return add


@_rule(torch.Tensor.__getitem__)
def _getitem(experts: Any, index: Any) -> Any:
    if not isinstance(experts, AdaptedExperts) or experts.chosen is not None:
        return NotImplemented
    if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and index.dim() < 2:
        return experts.at(index if index.dim() else int(index) % len(experts))
    if isinstance(index, int) and not isinstance(index, bool) and -len(experts) <= index < len(experts):
        return experts.at(index % len(experts))
    return NotImplemented


@_rule(torch.Tensor.select, torch.select, torch.Tensor.index_select, torch.index_select)
def _select(experts: Any, dim: int, index: Any) -> Any:
    return _getitem(experts, index) if dim == 0 else NotImplemented


@_rule(torch.Tensor.unbind, torch.unbind)
def _unbind(experts: AdaptedExperts, dim: int = 0) -> Any:
    every = dim == 0 and experts.chosen is None
    return tuple(experts.at(number) for number in range(len(experts))) if every else NotImplemented


@_rule(torch.Tensor.__iter__)
def _iter(experts: AdaptedExperts) -> Any:
    found = _unbind(experts)
    return found if found is NotImplemented else iter(found)


@_rule(torch.Tensor.transpose, torch.transpose)
def _transpose(experts: AdaptedExperts, first: int, second: int) -> Any:
    dims = experts.dim()
    return experts.swapped() if {first % dims, second % dims} == {dims - 2, dims - 1} else NotImplemented


@_rule(torch.Tensor.permute, torch.permute)
def _permute(experts: AdaptedExperts, *order: Any) -> Any:
    dims = order[0] if order and not isinstance(order[0], int) else order
    wanted = [*range(experts.dim() - 2), experts.dim() - 1, experts.dim() - 2]
    return experts.swapped() if [dim % experts.dim() for dim in dims] == wanted else NotImplemented


@_rule(torch.Tensor.t, torch.t, torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def _t(experts: AdaptedExperts, *_: Any) -> Any:
    return experts.swapped() if experts.dim() == 2 else NotImplemented


@_rule(torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def _m_t(experts: AdaptedExperts, *_: Any) -> Any:
    return experts.swapped()


@_rule(torch.Tensor.detach, torch.Tensor.contiguous)
def _same(experts: AdaptedExperts, **_: Any) -> Any:
    return experts


@_rule(torch.Tensor.to)
def _to(experts: Any, *args: Any, **kwargs: Any) -> Any:
    return experts.moved(*args, **kwargs) if isinstance(experts, AdaptedExperts) else NotImplemented


@_rule(functional.linear)
def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Any:
    if isinstance(input, AdaptedExperts) or not isinstance(weight, AdaptedExperts) or weight.dim() != 2:
        return NotImplemented
    result = functional.linear(input, weight.base, bias)
    return _with_one(input, weight.adapters.of(weight.chosen, not weight.is_swapped), result)


@_rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm
)
def _matmul(left: Any, right: Any) -> Any:
    if isinstance(left, AdaptedExperts):  # as right.T @ left.T
        if isinstance(right, AdaptedExperts) or right.dim() != left.dim():
            return NotImplemented
        result = _matmul(right.transpose(-2, -1), left.swapped())
        return result if result is NotImplemented else result.transpose(-2, -1)
    if right.dim() == 2:
        return _with_one(left, right.adapters.of(right.chosen, right.is_swapped), left @ right.base)
    return _bmm(left, right) if left.dim() == 3 and len(left) == len(right) else NotImplemented


def _bmm(left: Tensor, right: AdaptedExperts) -> Tensor:
    """Multiply each matrix of ``left`` by an expert; matrices for the same expert are brought together for the factors."""
    result, rows = torch.bmm(left, right.base), left.shape[1]
    if not isinstance(right.chosen, Tensor):
        return _with_each(left.flatten(0, 1), right, [rows] * len(left), result.flatten(0, 1)).view(result.shape)
    order = right.chosen.argsort(stable=True)
    sizes = [rows * count for count in right.chosen.bincount().tolist()]
    sorted_ = _with_each(left[order].flatten(0, 1), right, sizes, result[order].flatten(0, 1)).view(result.shape)
    return sorted_[order.argsort()]


# Names of one product: of torch.nn.functional, of torch (before 2.10), and an operator of transformers.
@_rule("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def _grouped_mm(func: Any, input: Any, weight: Any, offs: Tensor | None = None, **options: Any) -> Any:
    """Multiply rows up to ``offs[0]`` by the first expert, and so on."""
    if isinstance(input, AdaptedExperts) or not isinstance(weight, AdaptedExperts) or input.dim() != 2 or offs is None:
        return NotImplemented
    if weight.chosen is not None or any(value is not None for value in options.values()):
        return NotImplemented
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return _with_each(input, weight, sizes, func(input, weight.base, offs=offs))


def _with_one(x: Tensor, adapters: list[Factors], result: Tensor) -> Tensor:
    """Add the part of the adapters of one expert in ``x @ expert`` to ``result``, ``x`` of any dimensions."""
    flat = _added(x.reshape(-1, x.shape[-1]), adapters, result.reshape(-1, result.shape[-1]))
    return flat.view(result.shape)


def _with_each(x: Tensor, experts: AdaptedExperts, sizes: list[int], result: Tensor) -> Tensor:
    """Do the same where the first ``sizes[0]`` rows are for the first expert, and so on; rows after these get nothing."""
    sizes = [*sizes, len(x) - sum(sizes)]
    pieces = list(zip(x.split(sizes), result.split(sizes), strict=True))
    done = [
        _added(rows, experts.adapters.of(number, experts.is_swapped), part)
        for number, (rows, part) in enumerate(pieces[:-1])
        if len(rows)
    ]
    return torch.cat([*done, pieces[-1][1]])


def _added(x: Tensor, adapters: list[Factors], result: Tensor) -> Tensor:
    for factors in adapters:
        result = factors.add_product(result, x)
    return result
