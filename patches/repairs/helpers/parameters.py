"""Quantized parameters made again: of another tensor, and never by their constructor.

A subclass may have changed the constructor, so what it takes is not known. The class and the attributes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def like(old: Any, data: Tensor, **changes: Any) -> Any:
    """``data`` as a parameter of the class of ``old``, with its attributes, but for ``changes``."""
    import torch

    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    vars(new).update(vars(old), **changes)
    return new
