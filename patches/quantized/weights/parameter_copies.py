"""Quantized parameters made again: of another tensor, in pieces, from a pickle, and never by their constructor.

A subclass may have changed the constructor, so its arguments are not known. The class and the attributes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

_NOT_READ_BY_DEFAULT = 4
"""The first pickle protocol that ``torch.load`` refuses with ``weights_only=True``, its default."""


def make_like(old: Any, data: Tensor, **changes: Any) -> Any:
    """Return ``data`` as a parameter with the class and the attributes of ``old``, but for ``changes``."""
    import torch

    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    vars(new).update(vars(old), **changes)
    return new


def make_cut(
    cls: str, name: str, pieces: Callable[[Any, tuple[Tensor, ...], int], tuple[Tensor, ...]]
) -> Callable[[None], Callable[..., tuple[Tensor, ...]]]:
    """Return ``make`` for the method ``name`` of ``cls``, "chunk" or "split": in eager it returns ``pieces(whole, parts, dim)``.

    Not by ``__torch_function__``, with which Dynamo refuses ``weight ** 2``, ``1 - weight`` and more.
    """

    def make(original: None) -> Callable[..., tuple[Tensor, ...]]:
        import bitsandbytes.nn.modules as nn
        import torch

        kind = getattr(nn, cls)

        def cut(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            parts: tuple[Tensor, ...] = getattr(super(kind, self), name)(*args, **kwargs)
            if torch.compiler.is_compiling():
                return parts
            return pieces(self, parts, args[1] if len(args) > 1 else kwargs.get("dim", 0))

        cut.__name__ = name
        return cut

    return make


def is_read_by_default(protocol: int) -> bool:
    """Tell whether ``torch.load`` may be asked to read with ``weights_only=True`` a pickle of ``protocol``."""
    return protocol < _NOT_READ_BY_DEFAULT


def reduce_with_class(reduced: tuple[Any, ...], parameter: Any, **attributes_now: Any) -> tuple[Any, ...]:
    """Add the class of ``parameter`` to ``reduced``, the result of its ``Parameter.__reduce_ex__``.

    The class is one more entry of the state, because torch rebuilds a plain ``Parameter`` and then sets the entries of the
    state. So the pickle names nothing of ours, and no constructor is called. An attribute that is the data of the
    parameter (``CB``) is pickled once, not twice. ``attributes_now`` are attributes that the parameter shows and does not
    hold itself.
    """
    if len(reduced[1]) < 4 or not _can_become(type(parameter)):
        return reduced
    rebuild, (data, requires_grad, hooks, state) = reduced
    attributes, *slots = state if isinstance(state, tuple) else (state,)
    now = {**(attributes or {}), **attributes_now}
    whole = {name: data if _is_same(value, data) else value for name, value in now.items()}
    whole["__class__"] = type(parameter)
    return rebuild, (data, requires_grad, hooks, (whole, *slots) if slots else whole)


def _can_become(cls: type) -> bool:
    """Tell whether a plain ``Parameter`` may be given ``cls``; a subclass with slots is laid out otherwise."""
    import torch

    try:
        torch.nn.Parameter(torch.empty(0)).__class__ = cls
    except TypeError:
        return False
    return True


def _is_same(value: Any, data: Tensor) -> bool:
    import torch

    if type(value) is not torch.Tensor or (value.dtype, value.shape) != (data.dtype, data.shape):
        return False
    return (value.device, value.data_ptr(), value.stride()) == (data.device, data.data_ptr(), data.stride())


def make_setstate(
    owner: str, cls: str, marks: frozenset[str]
) -> Callable[[Callable[..., None] | None], Callable[..., None]]:
    """Return ``make`` for ``__setstate__`` of the layer ``owner``, which gives its parameters their class back.

    torch pickles the attributes of a parameter and not its class. A plain ``Parameter`` with all the attributes
    in ``marks`` was a ``cls``, and becomes one where it is: every other holder has the same object.
    """

    def make(original: Callable[..., None] | None) -> Callable[..., None]:
        import bitsandbytes.nn.modules as nn

        layer, kind = getattr(nn, owner), getattr(nn, cls)

        def __setstate__(self: Module, state: dict[str, Any]) -> None:
            if original is None:
                super(layer, self).__setstate__(state)
            else:
                original(self, state)
            for parameter in vars(self).get("_parameters", {}).values():
                if _lost_its_class(parameter, marks):
                    parameter.__class__ = kind

        return __setstate__

    return make


def _lost_its_class(parameter: Parameter | None, marks: frozenset[str]) -> bool:
    import torch

    return type(parameter) is torch.nn.Parameter and marks <= vars(parameter).keys()
