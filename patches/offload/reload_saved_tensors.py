"""Saved tensors of offloaded weights: autograd keeps where they come from, and backward brings them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..quantized.quantized_experts import is_quantized_experts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .offloaded_modules import Visit


def enter_saved_tensor_hooks(visits: Iterable[Visit]) -> Any:
    """Have autograd recall the tensors that it saves of the weights of ``visits``; exit the result, if it is not None.

    Nothing is done where autograd saves nothing, where a backward runs already (a recomputation, which needs them soon), and
    under saved-tensor hooks of someone else's, checkpointing among them: those decide themselves.
    """
    import torch

    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if torch._C._current_graph_task_id() != -1 or _has_hooks():
        return None
    places = {}
    for visit in visits:
        for name, tensor in visit.unchanged().items():
            places[_place(tensor)] = (visit.hook, name, tensor.dtype)
    if not places:
        return None
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _pack(tensor, places), _unpack)
    hooks.__enter__()
    return hooks


def _has_hooks() -> bool:
    """Tell whether saved-tensor hooks are on already in this thread."""
    import torch

    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True) is not None
    try:  # torch 2.6 and 2.7 have no way to ask; to turn them off fails where there are any
        with torch.autograd.graph.disable_saved_tensors_hooks("saved-tensor hooks are on"):
            return False
    except RuntimeError:
        return True


class _Kept:
    """A tensor that is no offloaded weight, with the version that it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # The result of an operation would hold the node that holds it here, for ever if there is no backward.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version

    def __call__(self) -> Tensor:
        if self.tensor._version != self.version:  # autograd does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.type()} {list(self.tensor.shape)} is at version {self.tensor._version}; "
                f"expected version {self.version} instead."
            )
        return self.tensor


class _Offloaded:
    """A view of an offloaded weight."""

    __slots__ = ("hook", "name", "brought", "dtype", "layout", "device")

    def __init__(self, tensor: Tensor, hook: Any, name: str, brought: torch.dtype) -> None:
        self.hook, self.name, self.brought = hook, name, brought
        self.dtype, self.device = tensor.dtype, tensor.device
        self.layout = tensor.shape, tensor.stride(), tensor.storage_offset()

    def __call__(self) -> Tensor:
        import torch

        value: Tensor = self.hook.weights_map[self.name]
        # What was cast since it was offloaded is cast each time that it is brought.
        value = value.detach().as_subclass(torch.Tensor).to(self.device).to(self.brought)
        return value.contiguous().view(-1).view(self.dtype).as_strided(*self.layout)


class _OffloadedExperts:
    """A view of offloaded experts: backward brings the experts again that the view shows, and no others."""

    __slots__ = ("hook", "name", "chosen", "swapped", "dtype", "device")

    def __init__(self, view: Any, hook: Any, name: str, brought: torch.dtype) -> None:
        self.hook, self.name = hook, name
        self.chosen, self.swapped, self.dtype, self.device = view.chosen, view.swapped, view.dtype, view.device

    def __call__(self) -> Tensor:
        if not isinstance(self.chosen, int):
            return self._shown(self.hook.weights_map[self.name].to(self.device), self.chosen)
        one = self._read_one(self.chosen)
        if one is not None:
            return self._shown(one, 0).to(self.device)
        return self._shown(self.hook.weights_map[self.name], self.chosen).to(self.device)

    def _read_one(self, number: int) -> Any:
        """Read the expert ``number`` alone, if the map of the hook can do so: from the disk."""
        weights = self.hook.weights_map
        kept = getattr(getattr(weights, "dataset", weights), "state_dict", None)
        read = getattr(kept, "read_expert", None)
        return None if read is None else read(f"{getattr(weights, 'prefix', '')}{self.name}", number)

    def _shown(self, experts: Any, chosen: int | Tensor | None) -> Tensor:
        view: Tensor = experts.detach().like(chosen=chosen, swapped=self.swapped, dtype=self.dtype)
        return view


def _place(tensor: Any) -> int:
    """Return a number that all views of one weight have in common; views of experts share packed weights."""
    return id(tensor.packed) if is_quantized_experts(tensor) else int(tensor.untyped_storage().data_ptr())


def _pack(tensor: Any, places: dict[int, tuple[Any, str, torch.dtype]]) -> Any:
    import torch

    # Sparse tensors have no storage of their own.
    place = places.get(_place(tensor)) if tensor.layout is torch.strided else None
    if place is None:
        return _Kept(tensor)
    if is_quantized_experts(tensor):
        return _OffloadedExperts(tensor, *place)
    return _Offloaded(tensor, *place)


def _unpack(saved: Callable[[], Tensor]) -> Tensor:
    return saved()
