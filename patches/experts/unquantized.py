"""Experts that a quantized model keeps in floating point: parameters of three dimensions, which are no linear layer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..quantized.four_bit import quant_states
from ..quantized.quantized_experts import is_quantized_experts
from .experts_in_model import find_row_concatenated_experts

if TYPE_CHECKING:
    import torch

SHARE_TO_REPORT = 0.1


class UnquantizedExperts(NamedTuple):
    """The unquantized experts of one model by name, their share of its parameter count, and the bytes of the whole model."""

    tensors: dict[str, torch.Tensor]
    share: float
    model_bytes: int

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dimensions(self) -> int:
        return next(iter(self.tensors.values())).dim()

    @property
    def dtypes(self) -> str:
        return " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()}))

    def __str__(self) -> str:
        first = next(iter(self.tensors))
        return first if len(self.tensors) == 1 else f"{first} and {len(self.tensors) - 1} more"


def find_unquantized_experts(model: torch.nn.Module) -> UnquantizedExperts | None:
    """Return the experts of ``model`` that are in floating point; None if they are less than `SHARE_TO_REPORT` of it."""
    tensors = dict(_stacked(model))
    parameters = list(model.parameters())
    share = sum(tensor.numel() for tensor in tensors.values()) / max(1, sum(map(_elements, parameters)))
    if share < SHARE_TO_REPORT:
        return None
    return UnquantizedExperts(tensors, share, sum(parameter.nbytes for parameter in parameters))


def _stacked(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Find 3-D parameters of many matrices in floating point, but no convolutions and no position embeddings (1, n, d)."""
    from torch.nn.modules.conv import _ConvNd

    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if parameter.dim() == 3 and parameter.shape[0] > 1 and parameter.is_floating_point():
            if not isinstance(owner, _ConvNd) and not is_quantized_experts(parameter):
                yield name, parameter
    for one in find_row_concatenated_experts(model):
        yield one.full_name, one.parameter


def _elements(parameter: torch.Tensor) -> int:
    """Return how many values a parameter stands for: two to each byte of packed 4-bit weights."""
    packed = type(parameter).__name__ == "Params4bit" and quant_states.is_packed(parameter)
    return parameter.numel() * (2 * parameter.element_size() if packed else 1)
