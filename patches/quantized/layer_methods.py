"""Methods of classes of ``bitsandbytes.nn`` with a function of ours around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..engine import SetAttribute

Method = Callable[..., Any]


def wrap_method(owner: str, name: str, run: Method, original_contains: str = "", when: str = "") -> SetAttribute:
    """Return the edit that puts ``run`` around the method ``name`` of the class ``owner``.

    The method calls ``run(self, inherited, *args, **kwargs)``. ``inherited`` is the bound method that the class had until
    then, of its own or of its base class. ``original_contains`` and ``when`` are the ones of :class:`SetAttribute`.
    """

    def make(original: Method | None) -> Method:
        import bitsandbytes.nn.modules as nn

        cls = getattr(nn, owner)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            inherited = getattr(super(cls, self), name) if original is None else original.__get__(self)
            return run(self, inherited, *args, **kwargs)

        method.__name__ = name
        return method

    return SetAttribute(
        f"bitsandbytes.nn.modules:{owner}.{name}", make=make, original_contains=original_contains, when=when
    )


class Load(NamedTuple):
    """A call of ``_load_from_state_dict``: ``load``, which loads as before, and the arguments."""

    load: Callable[..., None]
    state_dict: dict[str, Any]
    prefix: str
    local_metadata: dict[str, Any]
    strict: bool
    missing_keys: list[str]
    unexpected_keys: list[str]
    error_msgs: list[str]

    @property
    def assign(self) -> bool:
        """Tell whether the tensors of the state dict become parameters themselves, and are not copied."""
        return bool(self.local_metadata.get("assign_to_params_buffers", False))

    def run(self, state_dict: dict[str, Any] | None = None) -> None:
        """Load as before, from ``state_dict`` instead if one is given."""
        self.load(self.state_dict if state_dict is None else state_dict, *self[2:])
