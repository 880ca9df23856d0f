"""Quantized parameters made again: of another tensor, in pieces, and never by their constructor.

A subclass may have changed the constructor, so what it takes is not known. The class and the attributes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def like(old: Any, data: Tensor, **changes: Any) -> Any:
    """``data`` as a parameter of the class of ``old``, with its attributes, but for ``changes``."""
    import torch

    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    vars(new).update(vars(old), **changes)
    return new


def make_cut(
    cls: str, name: str, pieces: Callable[[Any, tuple[Tensor, ...], int], tuple[Tensor, ...]]
) -> Callable[[None], Callable[..., tuple[Tensor, ...]]]:
    """``make`` for the methods ``chunk`` and ``split`` of ``cls``: ``pieces(whole, parts, dim)``, in eager.

    A method, for with a ``__torch_function__`` Dynamo refuses ``weight ** 2``, ``1 - weight`` and more.
    """

    def make(original: None) -> Callable[..., tuple[Tensor, ...]]:
        import bitsandbytes.nn.modules as nn
        import torch

        kind = getattr(nn, cls)

        def cut(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            parts = getattr(super(kind, self), name)(*args, **kwargs)
            if torch.compiler.is_compiling():
                return parts
            return pieces(self, parts, args[1] if len(args) > 1 else kwargs.get("dim", 0))

        cut.__name__ = name
        return cut

    return make
