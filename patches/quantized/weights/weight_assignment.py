"""What a quantized layer does when a program assigns it another weight: around its ``__setattr__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Setattr = Callable[..., None]


def make_setattr(owner: str, notice: Callable[[Any, Any], None]) -> Callable[[Setattr | None], Setattr]:
    """Return ``make`` for ``__setattr__`` of the layer ``owner`` of ``bitsandbytes.nn``.

    ``notice(layer, old)`` is called after a weight was assigned, with the parameter that was there before or None.
    """

    def make(original: Setattr | None) -> Setattr:
        import bitsandbytes.nn.modules as nn

        layer = getattr(nn, owner)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            # A subclass may assign before `Module.__init__` has made a place for parameters.
            watched = name == "weight" and "_parameters" in self.__dict__
            old = self._parameters.get("weight") if watched else None
            if original is None:
                super(layer, self).__setattr__(name, value)
            else:
                original(self, name, value)
            if watched:
                notice(self, old)

        return __setattr__

    return make
