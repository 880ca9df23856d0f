"""Quantized parameters made again: of another tensor, in pieces, from a pickle, and never by their constructor.

A subclass may have changed the constructor, so its arguments are not known. The class and the attributes are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import SetAttribute
from ..layer_methods import wrap_method

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


def wrap_split_method(
    cls: str, name: str, pieces: Callable[[Any, tuple[Tensor, ...], int], tuple[Tensor, ...]], when: str = ""
) -> SetAttribute:
    """Return the edit of the method ``name`` of ``cls``, "chunk" or "split": in eager it returns ``pieces(whole, parts, dim)``.

    Not by ``__torch_function__``, with which Dynamo refuses ``weight ** 2``, ``1 - weight`` and more.
    """

    def run(whole: Any, inherited: Callable[..., tuple[Tensor, ...]], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        import torch

        parts = inherited(*args, **kwargs)
        if torch.compiler.is_compiling():
            return parts
        return pieces(whole, parts, args[1] if len(args) > 1 else kwargs.get("dim", 0))

    return wrap_method(cls, name, run, when=when)


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


def restore_class(owner: str, cls: str, marks: frozenset[str]) -> SetAttribute:
    """Return the edit of ``__setstate__`` of the layer ``owner`` that gives its parameters their class back.

    torch pickles the attributes of a parameter and not its class. A plain ``Parameter`` with all the attributes
    in ``marks`` was a ``cls``, and becomes one where it is: every other holder has the same object.
    """

    def run(layer: Module, inherited: Callable[..., None], state: dict[str, Any]) -> None:
        import bitsandbytes.nn.modules as nn

        inherited(state)
        for parameter in vars(layer).get("_parameters", {}).values():
            if _lost_its_class(parameter, marks):
                parameter.__class__ = getattr(nn, cls)

    return wrap_method(owner, "__setstate__", run)


def _lost_its_class(parameter: Parameter | None, marks: frozenset[str]) -> bool:
    import torch

    return type(parameter) is torch.nn.Parameter and marks <= vars(parameter).keys()
