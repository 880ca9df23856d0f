"""The layer that transformers quantized: an ``nn.Linear``, or the ``Conv1D`` of GPT-2, which keeps its weight transposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def _is_conv1d(quantized: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    source = getattr(quantized, "source_cls", None)  # transformers notes it
    return source is not None and issubclass(source, Conv1D)


def make_source_layer(quantized: Any, bias: Any) -> Module:
    """Make a layer on meta of the kind that ``quantized`` was made from; ``bias`` is None if it has none."""
    import torch
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        if _is_conv1d(quantized):
            layer: Module = Conv1D(quantized.out_features, quantized.in_features)
            return layer
        return torch.nn.Linear(quantized.in_features, quantized.out_features, bias=bias is not None)


def to_source_layout(quantized: Any, weight: Tensor) -> Tensor:
    """Return ``weight``, of shape (out, in), in the layout of that kind of layer."""
    return weight.t().contiguous() if _is_conv1d(quantized) else weight
