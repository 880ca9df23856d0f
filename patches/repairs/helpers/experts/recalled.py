"""Saved views of experts that are offloaded: backward brings the experts again that a view shows, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..loading import experts_on_disk

if TYPE_CHECKING:
    import torch

    from .tensor import QuantizedExperts


class Recalled:
    """A view of offloaded experts that autograd saved: where they come from, and what it shows of them."""

    __slots__ = ("hook", "name", "chosen", "swapped", "dtype", "device")

    def __init__(self, view: QuantizedExperts, hook: Any, name: str, brought: torch.dtype) -> None:
        self.hook, self.name = hook, name
        self.chosen, self.swapped, self.dtype, self.device = view.chosen, view.swapped, view.dtype, view.device

    def __call__(self) -> torch.Tensor:
        if not isinstance(self.chosen, int):
            return self._shown(self.hook.weights_map[self.name].to(self.device), self.chosen)
        one = experts_on_disk.one(self.hook.weights_map, self.name, self.chosen)
        if one is not None:
            return self._shown(one, 0).to(self.device)
        return self._shown(self.hook.weights_map[self.name], self.chosen).to(self.device)

    def _shown(self, experts: QuantizedExperts, chosen: int | torch.Tensor | None) -> torch.Tensor:
        return experts.detach().like(chosen=chosen, swapped=self.swapped, dtype=self.dtype)  # type: ignore[attr-defined,no-any-return]
