"""What the functions that run at this moment hold."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


def name_of(module: Module) -> str:
    """The longest dotted name of ``module`` in a model that a local variable of this stack is; empty if there is none.

    Whoever calls a layer nearly always has its model at hand, and a look at a stack takes a thousandth of the time of a look
    at everything that is alive.
    """
    from torch.nn import Module

    found, seen = "", {id(module)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for value in [*frame.f_locals.values()]:
            if issubclass(type(value), Module) and id(value) not in seen:  # not isinstance: a proxy would be asked
                seen.add(id(value))
                found = max(found, _name_in(value, module), key=len)
        frame = frame.f_back
    return found


def mover_of(weight: object) -> Module | None:
    """The module whose ``_apply`` runs in this stack (``to``, ``cuda``, ``half``) and has ``weight`` among its parameters."""
    from torch.nn import Module

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_apply":
            module: Any = frame.f_locals.get("self")
            if issubclass(type(module), Module) and any(own is weight for own in module._parameters.values()):
                mover: Module = module
                return mover
        frame = frame.f_back
    return None


def _name_in(model: Module, module: Module) -> str:
    return next((name for name, part in model.named_modules() if part is module), "")
