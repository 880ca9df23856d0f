"""What an operation does with :class:`~.adapted_experts.AdaptedExperts` in the place of forming them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .adapted_experts import RULES, AdaptedExperts, Factors, Rule
from .quantized_tensor import QuantizedExperts


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return add


@_rule(
    *(torch.Tensor.__getitem__, torch.Tensor.select, torch.select, torch.Tensor.unbind, torch.unbind),
    *(torch.Tensor.transpose, torch.transpose, torch.Tensor.permute, torch.permute, torch.Tensor.t, torch.t),
    *(torch.Tensor.T.__get__, torch.Tensor.mT.__get__),  # type: ignore[attr-defined]
)
def _view(func: Any, experts: Any, *args: Any, **kwargs: Any) -> Any:
    """View the base, and give each view its adapters; ``NotImplemented`` where they are no views of the same experts."""
    if not isinstance(experts, AdaptedExperts):
        return NotImplemented
    made = func(experts.base, *args, **kwargs)
    views = made if isinstance(made, tuple) else (made,)
    if not all(isinstance(view, QuantizedExperts) and view.packed is experts.base.packed for view in views):
        return NotImplemented
    adapted = tuple(map(experts.with_base, views))
    return adapted if isinstance(made, tuple) else adapted[0]


@_rule(torch.Tensor.index_select, torch.index_select)
def _index_select(_: Any, experts: Any, dim: int, index: Any) -> Any:
    return experts[index] if dim == 0 else NotImplemented


@_rule(torch.Tensor.__iter__)
def _iter(_: Any, experts: AdaptedExperts) -> Any:
    return iter(experts.unbind())


@_rule(torch.Tensor.detach, torch.Tensor.contiguous)
def _same(_: Any, experts: AdaptedExperts, **__: Any) -> Any:
    return experts


@_rule(torch.Tensor.to)
def _to(_: Any, experts: Any, *args: Any, **kwargs: Any) -> Any:
    return experts.moved(*args, **kwargs) if isinstance(experts, AdaptedExperts) else NotImplemented


@_rule(functional.linear)
def _linear(_: Any, input: Any, weight: Any, bias: Tensor | None = None) -> Any:
    if isinstance(input, AdaptedExperts) or not isinstance(weight, AdaptedExperts) or weight.dim() != 2:
        return NotImplemented
    return _with_one(input, weight.factors(transposed=True), functional.linear(input, weight.base, bias))


@_rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm
)
def _matmul(func: Any, left: Any, right: Any) -> Any:
    if isinstance(left, AdaptedExperts):  # as right.T @ left.T
        if isinstance(right, AdaptedExperts) or right.dim() != left.dim():
            return NotImplemented
        result = _matmul(func, right.transpose(-2, -1), left.transpose(-2, -1))
        return result if result is NotImplemented else result.transpose(-2, -1)
    if right.dim() == 2:
        return _with_one(left, right.factors(), left @ right.base)
    return _bmm(left, right) if left.dim() == 3 and len(left) == len(right) else NotImplemented


def _bmm(left: Tensor, right: AdaptedExperts) -> Tensor:
    """Multiply each matrix of ``left`` by an expert; matrices for the same expert are brought together for the factors."""
    result, rows, chosen = torch.bmm(left, right.base), left.shape[1], right.base.chosen
    if not isinstance(chosen, Tensor):
        return _with_each(left.flatten(0, 1), right, [rows] * len(left), result.flatten(0, 1)).view(result.shape)
    order = chosen.argsort(stable=True)
    sizes = [rows * count for count in chosen.bincount().tolist()]
    sorted_ = _with_each(left[order].flatten(0, 1), right, sizes, result[order].flatten(0, 1)).view(result.shape)
    return sorted_[order.argsort()]


# Names of one product: of torch.nn.functional, of torch (before 2.10), and an operator of transformers.
@_rule("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def _grouped_mm(func: Any, input: Any, weight: Any, offs: Tensor | None = None, **options: Any) -> Any:
    """Multiply rows up to ``offs[0]`` by the first expert, and so on."""
    if isinstance(input, AdaptedExperts) or not isinstance(weight, AdaptedExperts) or input.dim() != 2 or offs is None:
        return NotImplemented
    if weight.base.chosen is not None or any(value is not None for value in options.values()):
        return NotImplemented
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return _with_each(input, weight, sizes, func(input, weight.base, offs=offs))


def _with_one(x: Tensor, factors: list[Factors], result: Tensor) -> Tensor:
    """Add the part of the adapters of one expert in ``x @ expert`` to ``result``, ``x`` of any dimensions."""
    flat = _added(x.reshape(-1, x.shape[-1]), factors, result.reshape(-1, result.shape[-1]))
    return flat.view(result.shape)


def _with_each(x: Tensor, experts: AdaptedExperts, sizes: list[int], result: Tensor) -> Tensor:
    """Do the same where the first ``sizes[0]`` rows are for the first expert, and so on; rows after these get nothing."""
    sizes = [*sizes, len(x) - sum(sizes)]
    pieces = list(zip(x.split(sizes), result.split(sizes), strict=True))
    done = [
        _added(rows, experts.factors_of(number), part) for number, (rows, part) in enumerate(pieces[:-1]) if len(rows)
    ]
    return torch.cat([*done, pieces[-1][1]])


def _added(x: Tensor, adapters: list[Factors], result: Tensor) -> Tensor:
    for factors in adapters:
        result = factors.add_product(result, x)
    return result
