"""Answers from the local variables of the functions that run at this moment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def name_of(module: Module) -> str:
    """Return the longest dotted name of ``module`` in a model among the local variables of this stack; else "".

    A caller of a layer nearly always has its model at hand, and a look at a stack takes a thousandth of the time of a look
    at everything that is alive.
    """
    from torch.nn import Module

    found, seen = "", {id(module)}
    for frame in _frames():
        for value in [*frame.f_locals.values()]:
            if issubclass(type(value), Module) and id(value) not in seen:  # not isinstance: a proxy would be asked
                seen.add(id(value))
                names = (name for name, part in value.named_modules() if part is module)
                found = max(found, next(names, ""), key=len)
    return found


def mover_of(weight: object) -> Module | None:
    """Return the module with the parameter ``weight`` whose ``_apply`` runs in this stack (``to``, ``cuda``, ``half``)."""
    from torch.nn import Module

    for frame in _frames():
        if frame.f_code.co_name == "_apply":
            module: Any = frame.f_locals.get("self")
            if issubclass(type(module), Module) and any(own is weight for own in module._parameters.values()):
                mover: Module = module
                return mover
    return None


def running_module(*kinds: type[Module]) -> Module | None:
    """Return the innermost module of ``kinds`` with a method that runs in this stack, or None."""
    found = (frame.f_locals.get("self") for frame in _frames())
    return next((module for module in found if issubclass(type(module), kinds)), None)


def loads_strictly() -> bool:
    """Tell whether no ``load_state_dict(strict=False)`` runs in this stack; torch itself tells modules True either way."""
    frame = _load_state_dict()
    return frame is None or frame.f_locals.get("strict") is not False


def loads_in_parts() -> bool:
    """Tell whether a program's ``load_state_dict(strict=False)`` runs in this stack: missing keys may come in the next.

    False where torch.distributed calls it, which sends all keys at once.
    """
    frame = _load_state_dict()
    if frame is None or frame.f_locals.get("strict") is not False or frame.f_back is None:
        return False
    return not str(frame.f_back.f_globals.get("__name__")).startswith("torch.distributed")


def _load_state_dict() -> FrameType | None:
    for frame in _frames():
        if frame.f_code.co_name == "load_state_dict" and frame.f_globals.get("__name__") == "torch.nn.modules.module":
            return frame
    return None


def target_name() -> str:
    """Return the name of the module that peft adds an adapter to in this stack; empty if it adds none."""
    for frame in _frames():
        if frame.f_code.co_name == "_create_and_replace" and isinstance(name := frame.f_locals.get("current_key"), str):
            return name
    return ""


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the callers of this module, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
