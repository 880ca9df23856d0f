"""Quantized experts with low-rank adapters: one tensor that a model's code reads in the place of its parameter.

peft's wrapper of a parameter adds the adapter to the weights for the time of a forward: ``W + scaling * B @ A``, for
all experts at once. Of quantized experts that sum would be the floating-point tensor that quantizing avoids. An
:class:`AdaptedExperts` stands for the sum and never forms it: an expert that is selected is its quantized matrix and
its own factors, and a product with it is the base's product and two small ones.

It works above autograd, by ``__torch_function__``. So the factors get their gradients from the very operations that are
run, the base dequantizes again in backward as it does without adapters, and a checkpoint recomputes both. An operation
that needs all numbers at once gets them and is reported (:mod:`.dense`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..process import tracing
from .dense_operations import record_dense_operation
from .quantized_tensor import QuantizedExperts

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""By function, or by the name of several: the rule that gets it and its arguments; :mod:`.adapted_rules` fills it.

A rule returns ``NotImplemented`` if it is not for these arguments."""
_LOOKS = {
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    *(getattr(torch.Tensor, name) for name in ("dim", "size", "stride", "numel", "is_floating_point", "is_complex")),
    *(getattr(torch.Tensor, name) for name in ("__len__", "__hash__", "data_ptr", "element_size")),
}
"""Functions that ask for a shape, a dtype or the like, and for no number."""


class Factors(NamedTuple):
    """One adapter, which adds ``scaling * left @ right`` to each expert (three dimensions) or to one (two)."""

    left: Tensor
    right: Tensor
    scaling: float

    def swapped(self) -> Factors:
        return Factors(self.right.transpose(-2, -1), self.left.transpose(-2, -1), self.scaling)

    def add_product(self, result: Tensor, x: Tensor) -> Tensor:
        """Return ``result`` plus the part of the adapter in ``x @ W``; all of them matrices."""
        low = x @ self.left.to(x.dtype)
        return torch.addmm(result, low, self.right.to(low.dtype), alpha=self.scaling)


class Adapters:
    """All adapters of one parameter, one :class:`Factors` each."""

    def __init__(self, adapters: Sequence[Factors]) -> None:
        self.whole = list(adapters)
        self._experts: list[list[tuple[Tensor, Tensor]]] | None = None

    def of(self, chosen: Tensor | int | None, is_swapped: bool) -> list[Factors]:
        """Return the factors of one expert, of a vector of their numbers, or of all (None), ``is_swapped`` for W.T."""
        if chosen is None:
            found = self.whole
        elif isinstance(chosen, Tensor):
            found = [Factors(f.left[chosen], f.right[chosen], f.scaling) for f in self.whole]
        else:
            if self._experts is None:  # by one operation: a selection for each would be as many gradients of full size
                self._experts = [list(zip(f.left.unbind(0), f.right.unbind(0), strict=True)) for f in self.whole]
            pairs = zip(self._experts, self.whole, strict=True)
            found = [Factors(*experts[chosen], whole.scaling) for experts, whole in pairs]
        return [factors.swapped() for factors in found] if is_swapped else found

    def __add__(self, other: Adapters) -> Adapters:
        return Adapters([*self.whole, *other.whole])

    def __radd__(self, experts: QuantizedExperts) -> AdaptedExperts:
        """Return ``experts + self``, as peft's wrapper writes it."""
        return AdaptedExperts(experts, self, experts.swapped)

    def moved(self, device: torch.device, experts: slice) -> Adapters:
        """Return the adapters of ``experts`` on ``device``."""
        return Adapters(
            [Factors(f.left[experts].to(device), f.right[experts].to(device), f.scaling) for f in self.whole]
        )


class AdaptedExperts(torch.Tensor):
    """``base`` and what ``adapters`` add to it: all experts, a selection of them, or one, as ``base`` is.

    ``adapted_swapped``: how ``base`` was swapped when the factors were given for it.
    """

    base: QuantizedExperts
    adapters: Adapters
    adapted_swapped: bool

    @staticmethod
    @tracing.never_compile
    def __new__(cls, base: QuantizedExperts, adapters: Adapters, adapted_swapped: bool) -> AdaptedExperts:
        made: AdaptedExperts = torch.Tensor._make_wrapper_subclass(
            cls, base.shape, strides=base.stride(), dtype=base.dtype, device=base.device, requires_grad=False
        )
        made.base, made.adapters, made.adapted_swapped = base, adapters, adapted_swapped
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def factors(self, transposed: bool = False) -> list[Factors]:
        """Return the factors of these experts, each as the base shows it, or ``transposed``."""
        return self.adapters.of(self.base.chosen, self._is_swapped() != transposed)

    def factors_of(self, number: int) -> list[Factors]:
        """Return the factors of one expert of all, as the base shows it."""
        return self.adapters.of(number, self._is_swapped())

    def _is_swapped(self) -> bool:
        return self.base.swapped != self.adapted_swapped

    def with_base(self, view: QuantizedExperts) -> AdaptedExperts:
        """Return ``view``, which is one of the base, with the adapters."""
        return AdaptedExperts(view, self.adapters, self.adapted_swapped)

    def moved(self, *args: Any, **kwargs: Any) -> AdaptedExperts:
        """Move as :meth:`torch.Tensor.to`. Factors move with the base; they take its dtype where they are used."""
        base: Any = self.base.to(*args, **kwargs)
        if base.device == self.device:
            return self.with_base(base)
        number = self.base.chosen
        moved = slice(number, number + 1) if isinstance(number, int) else slice(None)  # one expert moves alone
        return AdaptedExperts(base, self.adapters.moved(base.device, moved), self.adapted_swapped)

    def dense(self) -> Tensor:
        """Return all of it in floating point."""
        whole = self.base * 1  # the product of quantized experts and a number is an ordinary tensor
        for part in self.factors():
            whole = whole + (part.left @ part.right * part.scaling).to(whole.dtype)
        return whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AdaptedExperts({self.base!r}, {len(self.adapters.whole)} adapters)"

    @classmethod
    @tracing.never_compile  # peft's wrapper has ended the graph before
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).removesuffix(".default")
        rule = RULES.get(name) or RULES.get(func)
        result = rule(func, *args, **kwargs) if rule is not None else NotImplemented
        if result is NotImplemented and (func in _LOOKS or name == "__get__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _call_dense(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        return _call_dense(func, args, kwargs or {})


def _call_dense(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with ordinary tensors in the place of adapted experts, and record that."""

    def plain(value: Any) -> Any:
        if not isinstance(value, AdaptedExperts):
            return value
        record_dense_operation(f"{getattr(func, '__name__', func)} with adapters", value)
        return value.dense()

    args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs))
    return func(*args, **kwargs)
